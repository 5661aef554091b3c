"""The translations that ComfyUI's browser reads agree with the nodes they describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LOCALES = Path(__file__).parents[2] / "locales"
SYNTAX = set("{}@|$")  # these mean something in the browser's message format


def own_nodes(host) -> dict:
    names = set(host.nodes.NODE_CLASS_MAPPINGS) - host.classes_before
    return {name: host.nodes.NODE_CLASS_MAPPINGS[name].define_schema() for name in names}


def texts(tree) -> list[str]:
    return [tree] if isinstance(tree, str) else [text for part in tree.values() for text in texts(part)]


def named(part, name: str) -> dict:
    return {"name": name, "tooltip": part.tooltip}


def test_english_says_what_the_nodes_say(host):
    expected = {}
    for name, schema in own_nodes(host).items():
        expected[name] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {part.id: named(part, part.display_name or part.id) for part in schema.inputs},
            "outputs": {
                str(place): named(part, part.display_name or part.get_io_type())
                for place, part in enumerate(schema.outputs)
            },
        }
    assert json.loads((LOCALES / "en" / "nodeDefs.json").read_text(encoding="utf-8")) == expected


@pytest.mark.parametrize("file", sorted(LOCALES.glob("*/*.json")), ids=lambda file: f"{file.parent.name}-{file.name}")
def test_no_text_holds_a_character_of_the_message_format(file):
    found = [text for text in texts(json.loads(file.read_text(encoding="utf-8"))) if SYNTAX & set(text)]
    assert not found


def test_the_server_hands_the_translations_to_the_browser(server):
    told = server.get("/i18n")["en"]["nodeDefs"]
    assert told == json.loads((LOCALES / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
