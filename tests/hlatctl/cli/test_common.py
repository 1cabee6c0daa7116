"""What the commands share: output."""

from __future__ import annotations

import json

import pytest
import typer

from hlatctl.cli.common import print_json, say, write


def test_json_has_no_character_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"größe": "plain", "name": "a\u202eb\x9b31m\x1b[2J\U000e0041\n"}
    print_json(value)
    printed = capsys.readouterr().out
    assert json.loads(printed) == value
    assert all(line.isprintable() for line in printed.split("\n"))
    assert "größe" in printed


def test_only_the_emphasis_of_tables_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for printed in (write, say):
        printed("\x1b]52;c;aGk=\x07\x1b]8;;http://h\x1b\\\x9b2J\u202e\r\x08a\tb\nc\u3000d")
    out, err = capsys.readouterr()
    assert out == err == "\\x1b]52;c;aGk=\\x07\\x1b]8;;http://h\\x1b\\\\x9b2J\\u202e\\r\\x08a\tb\nc\u3000d\n"


def test_bold_text_stays_bold_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(typer, "echo", lambda text, nl: shown.append(text))
    write("\x1b[1mbest\x1b[0m \x1b[8mhidden")
    assert shown == ["\x1b[1mbest\x1b[0m \\x1b[8mhidden"]
