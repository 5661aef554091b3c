"""The command line, run in this process: files and their contracts, output, exit codes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from carnator_core import media
from carnator_core.__main__ import COMMANDS, main
from carnator_core.commands import doctor
from carnator_core.commands.generate import file_name
from carnator_core.commands.page import _outline
from carnator_core.console import bank_folder
from carnator_core.mini import world

PROMPT = "one large red ball moving left over the forest, steady camera"
SMALL = ("--size", "32", "--steps", "3")


def call(*argv: str) -> int:
    try:
        return main([str(one) for one in argv])
    except SystemExit as stop:
        return stop.code


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """No test reads or writes what belongs to the person who runs it."""
    monkeypatch.delenv("CARNATOR_BANK", raising=False)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[int, Path]:
    """The demo in a folder whose bank is not empty: it has to begin with an empty one all the same."""
    folder = tmp_path_factory.mktemp("demo")
    call("generate", PROMPT, "--seed", "7", "--bank", folder / "demo-bank", "--out", folder / "before", *SMALL)
    return call("demo", "--out", folder, "--size", "32", "--steps", "5"), folder


def runs_of(folder: Path) -> list[dict]:
    return json.loads((folder / "report.json").read_text())["runs"]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Files with their times. The lock file and the empty log that SQLite's readers leave do not count."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".sqlite-shm")
    found = {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    return {name: what for name, what in found.items() if not (name.endswith(".sqlite-wal") and what[1] == b"")}


def test_the_demo_keeps_its_contract(demo):
    code, folder = demo
    runs = runs_of(folder)
    assert len(runs) == 7
    for run in runs:
        assert {"name", "prompt", "report", "faithfulness", "faithfulness_dense", "psnr"} <= set(run)
        assert 0 <= run["faithfulness"] <= 1 and 0 <= run["faithfulness_dense"] <= 1
        assert world.parse(run["prompt"]) and run["report"]["schema"] == 1
        assert len(run["report"]["steps"]) == 5
    unexpected = [run for run in runs if run["expected"] not in (None, run["report"]["decision"])]
    assert code == (1 if unexpected else 0)


def test_the_demo_shows_every_kind_of_request(demo):
    runs = {run["name"]: run for run in runs_of(demo[1])}
    cold, again, far = runs["cold"], runs["same again"], runs["new scene"]
    assert cold["report"]["decision"] == "miss" and cold["report"]["reason"] == "the bank is empty"
    assert again["report"]["decision"] == "exact" and again["prompt"] == cold["prompt"]
    assert far["report"]["decision"] == "miss" and far["report"]["risk"] > far["report"]["threshold"]
    assert runs["other seed"]["prompt"] == cold["prompt"] and runs["other seed"]["seed"] != cold["seed"]
    one_word = [run for run in runs.values() if run["expected"] == "joint"]
    words = set(cold["prompt"].split())
    assert len(one_word) >= 3 and all(len(set(run["prompt"].split()) - words) == 1 for run in one_word)
    for run in runs.values():
        assert run["bit_equal"] == (run["report"]["decision"] != "joint")


def test_the_demo_leaves_clips_that_can_be_opened(demo):
    folder = demo[1]
    for run in runs_of(folder):
        for files in (run["files"], run["files_dense"]):
            with Image.open(folder / files["gif"]) as clip, Image.open(folder / files["png"]) as strip:
                assert clip.format == "GIF" and strip.format == "PNG"
                assert strip.size == (5 * clip.width, clip.height)
            assert ("mp4" in files) == media.can_mp4()


class Loads(HTMLParser):
    """Everything a page would fetch, jump to or run."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.sources, self.jumps, self.ids = set(), [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        found = dict(attrs)
        self.sources += [found[name] for name in ("src", "srcset", "data", "poster", "background") if name in found]
        self.jumps += [found["href"]] if "href" in found else []
        self.ids |= {found["id"]} if "id" in found else set()


def test_the_page_holds_all_it_shows(demo):
    text = (demo[1] / "report.html").read_text()
    page = Loads(text)
    assert page.sources and all(source.startswith("data:image/") for source in page.sources)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "video"}
    assert "url(" not in text and "@import" not in text and "http" not in text.replace("http-equiv", "")
    assert page.jumps and all(jump.startswith("#") and jump[1:] in page.ids for jump in page.jumps)
    assert "width=device-width" in text and "prefers-color-scheme: dark" in text


def test_the_page_tells_what_happened(demo):
    text = (demo[1] / "report.html").read_text()
    cards = re.findall(r"<article.*?</article>", text, re.DOTALL)
    runs = runs_of(demo[1])
    assert len(cards) == len(runs)
    for card, run in zip(cards, runs, strict=True):
        report = run["report"]
        assert f'class="chip {report["decision"]}"' in card
        assert re.search(r'class="steps".*?</div>', card, re.DOTALL)[0].count("<span class=") == len(report["steps"])
        assert f"{report['forwards']:g} of {len(report['steps'])}" in card
        assert ("bit-equal" in card) == run["bit_equal"]
        assert ("<svg" in card) == ("region" in report["discrepancies"])
        assert card.count("unreadable</td>") == sum(
            row[which] is None for row in run["attributes"].values() for which in ("read", "dense")
        )


def test_an_outline_runs_along_the_border_of_a_region():
    region = torch.zeros(2, 4, 4, dtype=torch.bool)
    region[1, 1:3, 0] = True
    assert sorted(re.findall(r"M[^M\"]*", _outline(region, 32))) == sorted(
        ["M32 8v8", "M32 16v8", "M40 8v8", "M40 16v8", "M32 8h8", "M32 24h8"]
    )


def test_generate_writes_a_clip_and_finds_it_again(tmp_path, capsys):
    bank, out = tmp_path / "bank", tmp_path / "clips"
    assert call("generate", PROMPT, "--bank", bank, "--out", out, *SMALL) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Carnator: miss") and "warning" not in said.err
    assert all(Path(line).is_file() for line in said.out.splitlines()[1:])
    assert call("generate", PROMPT, "--bank", bank, "--out", out, *SMALL, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["decision"] == "exact" and found["known_words"] is True
    saved = json.loads(Path(found["files"]["report"]).read_text())
    assert saved["report"] == found["report"] and set(found["files"]) >= {"gif", "png"}


def test_explain_writes_nothing(tmp_path, capsys):
    bank, other = tmp_path / "bank", PROMPT.replace("red", "blue")
    assert call("generate", PROMPT, "--bank", bank, *SMALL) == 0
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert call("generate", other, "--bank", bank, *SMALL, "--explain", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert snapshot(tmp_path) == before
    assert not found["exact"] and found["probe"] == 1 and len(found["plan"]) == 3
    (donor,) = found["donors"]
    assert donor["same_noise"] and donor["prompt"] == PROMPT and 0 < donor["similarity"] < 1
    assert call("generate", other, "--bank", bank, *SMALL, "--seed", "1", "--explain") == 0
    assert "other (seed 0)" in capsys.readouterr().out
    assert call("generate", PROMPT, "--bank", bank, *SMALL, "--explain") == 0
    assert "no step computed" in capsys.readouterr().out
    assert call("generate", PROMPT, "--bank", tmp_path / "none", *SMALL, "--explain") == 0
    assert "the bank is empty" in capsys.readouterr().out and not (tmp_path / "none").exists()
    assert snapshot(tmp_path) == before


def test_words_of_another_world_are_warned_of_and_still_run(tmp_path, capsys):
    assert call("generate", "ein Hund läuft / 犬", "--bank", tmp_path / "bank", "--size", "32", "--steps", "1") == 0
    said = capsys.readouterr()
    assert "knows only the words of its own world" in said.err and said.out.startswith("Carnator: miss")
    assert all(Path(line).parent == Path("out") and Path(line).is_file() for line in said.out.splitlines()[1:])


@pytest.mark.parametrize("prompt", ["../../etc/passwd", "a\x00b", "///", "x" * 500, "CON: <|>?*"])
def test_a_prompt_makes_a_name_that_any_file_system_takes(prompt):
    assert re.fullmatch(r"[a-z0-9-]{1,90}", file_name(prompt, 2**63 - 1, 64, 1000))


def test_the_default_bank_is_shared_by_all_commands(tmp_path, monkeypatch, capsys):
    assert call("bank", "ls") == 2
    assert call("generate", PROMPT, "--size", "32", "--steps", "1") == 0
    assert bank_folder().is_dir() and tmp_path in bank_folder().parents
    capsys.readouterr()
    assert call("bank", "ls", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 1
    monkeypatch.setenv("CARNATOR_BANK", str(tmp_path / "named"))
    assert bank_folder() == tmp_path / "named" and call("bank", "ls") == 2


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("bogus",),
        ("demo",),
        ("demo", "--out", "d", "--size", "33"),
        ("demo", "--out", "a-file"),
        ("generate",),
        ("generate", "  "),
        ("generate", "\udc80"),
        ("generate", PROMPT, "--seed", "-1"),
        ("generate", PROMPT, "--steps", "0"),
        ("generate", PROMPT, "--steps", "many"),
        ("generate", PROMPT, "--policy", "wild"),
        ("generate", PROMPT, "--bank", "a-file"),
        ("generate", PROMPT, "--out", "a-file"),
        ("bank", "show"),
        ("bench", "bogus"),
        ("bench", "bank", "--entries", "0"),
        ("doctor", "--bogus"),
    ],
)
def test_bad_arguments_give_2(argv, tmp_path, capsys):
    (tmp_path / "a-file").write_text("")
    assert call(*argv) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert call(command, "--help") == 0
    assert "usage: python -m carnator_core " + command in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_fails_in_one_line(tmp_path, capsys):
    (tmp_path / "a-file").write_text("")
    assert call("demo", "--out", tmp_path / "a-file" / "inside") == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_bench_finds_the_banks(capsys):
    assert call("bench", "bank", "--entries", "20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 20


def test_doctor_tells_what_is_here_and_changes_nothing(tmp_path, capsys):
    assert call("doctor", "--bank", tmp_path / "none") == 0
    text = capsys.readouterr().out
    assert "no problems found" in text and "the first run makes it" in text
    assert call("doctor", "--bank", tmp_path / "none", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] and found["devices"][0]["device"] == "cpu" and not (tmp_path / "none").exists()
    supported = {(row["pipeline"], row["note"]): row["supported"] for row in found["pipelines"]}
    assert supported["WanPipeline", "Wan 2.1 text-to-video"] and not supported["WanPipeline", "Wan 2.2 14B"]
    assert all(row["why_not"] for row in found["pipelines"] if not row["supported"])


def test_doctor_names_what_must_be_mended(tmp_path, monkeypatch, capsys):
    (tmp_path / "a-file").write_text("")
    assert call("doctor", "--bank", tmp_path / "a-file") == 1
    assert "is no folder" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "NEEDED", ("torch", "a-package-that-nobody-made"))
    assert call("doctor", "--bank", tmp_path / "none", "--json") == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("a-package-that-nobody-made is not installed")
