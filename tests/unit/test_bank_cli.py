"""`bank ls|show|rm|verify|gc|rebuild`: output and exit codes."""

from __future__ import annotations

import argparse
import json

import pytest

from carnator_core.bank import Bank
from carnator_core.bank.cli import add_parser
from tests.unit.test_bank_support import draft, request


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("CARNATOR_BANK", raising=False)
    with Bank(tmp_path / "bank") as bank:
        for seed in (1, 2, 3):
            bank.write(draft(seed))
    return tmp_path / "bank"


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    try:
        args = parser.parse_args(["bank", *arguments])
    except SystemExit as stop:
        return stop.code
    return args.run(args)


def test_ls(root, capsys):
    assert call("ls", "--bank", str(root)) == 0
    text = capsys.readouterr().out
    assert "prompt 2" in text and "1x4x2x6x6" in text and "3 entries of 1 identities" in text
    assert call("ls", "--bank", str(root), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["entries"]) == 3 and data["stats"]["entries"] == 3


def test_the_folder_may_come_from_the_environment(root, monkeypatch, capsys):
    assert call("ls") == 2
    monkeypatch.setenv("CARNATOR_BANK", str(root))
    assert call("ls") == 0
    assert call("ls", "--bank", str(root / "none")) == 2 and "no folder" in capsys.readouterr().err


def test_show_and_rm(root, capsys):
    with Bank(root) as bank:
        one = bank.exact(request(1)).id
    assert call("show", one[:10], "--bank", str(root)) == 0
    assert "profile.prompt: prompt 1" in capsys.readouterr().out
    assert call("show", one, "--bank", str(root), "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == one
    assert call("rm", one, one[:12], "--bank", str(root)) == 0 and "1 of 1" in capsys.readouterr().out
    assert call("rm", one, "--bank", str(root)) == 1 and call("show", one, "--bank", str(root)) == 1
    assert call("rm", "xyz", "--bank", str(root)) == 2 and call("rm", "abc", "--bank", str(root)) == 2
    assert call("rm", "--bank", str(root)) == 2 and call("bogus") == 2


def test_verify_gc_rebuild(root, capsys):
    assert call("verify", "--bank", str(root)) == 0 and "3 of 3 entries are sound" in capsys.readouterr().out
    with Bank(root) as bank:
        one = bank.exact(request(1)).id
    (root / "entries" / one / "result.safetensors").write_bytes(b"x")
    assert call("verify", "--bank", str(root), "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["checked"] == 3 and list(data["bad"]) == [one]
    assert call("gc", "--bank", str(root)) == 0 and "2 remain" in capsys.readouterr().out
    assert call("gc", "--bank", str(root), "--json", "--budget-gib", "1e-6") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 0
    assert call("gc", "--bank", str(root), "--budget-gib", "-1") == 2
    assert call("rebuild", "--bank", str(root), "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 0


def test_a_prompt_does_not_steer_the_terminal(root, capsys):
    with Bank(root) as bank:
        asked = request(7)
        object.__setattr__(asked.profile, "prompt", "\x1b[2J evil \ud800 " + "long " * 100)
        assert bank.write(draft(7, request=asked))
    assert call("ls", "--bank", str(root)) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "evil" in text and max(map(len, text.splitlines())) < 150
