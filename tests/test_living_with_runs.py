"""Every command line of the pages on runs is one that `hlatctl` accepts."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from hlatctl.cli.main import app

DOCS = Path(__file__).parents[1] / "docs"
_LINE = re.compile(r"^    (hlatctl .*)$", re.MULTILINE)


def lines() -> list[str]:
    pages = ("living-with-runs.md", "operations.md")
    return list(dict.fromkeys(line for page in pages for line in _LINE.findall((DOCS / page).read_text("utf-8"))))


@pytest.mark.parametrize("line", lines())
def test_a_command_of_the_pages_is_accepted(line: str) -> None:
    words = shlex.split(line.replace(" ...", ""), comments=True)[1:]
    command: Any = typer.main.get_command(app)
    # `hlatctl eval TARGET` is a group with a command of its own.
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    with suppress(typer.Exit):  # an option that prints and ends
        command.make_context(command.name, words)
