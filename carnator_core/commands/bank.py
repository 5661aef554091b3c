"""`bank`: the bank's own commands, with the folder that all commands share."""

from __future__ import annotations

from typing import Any

from ..bank import cli
from ..console import bank_folder


def add_parser(subparsers: Any) -> None:
    cli.add_parser(subparsers, bank_folder())
