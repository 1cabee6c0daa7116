"""The tables of docs/troubleshooting.md have every exit code, error, cause of a failure and alarm of the code."""

from __future__ import annotations

import re
from typing import get_args

from flows.recovery.failure_causes import Cause
from hlatctl.run.errors import error_types
from hlatctl.run.fold import BEHIND
from tests.docs.pages import DOCS, REPOSITORY

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
#: Of the command line itself, without an error of ours: done, wrong usage.
_WITHOUT_ERROR = {0, 2}
#: Where the trainer's source raises an alarm, and the alarm's name.
_ALARM = re.compile(r'"alarm"[^\n]*?"?what"?[=:] ?"(\w+)"')


def rows(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section, without its head."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [re.split(r" ?\| ", line) for line in lines][1:]


def test_every_exit_code_is_there_with_its_errors_and_no_other() -> None:
    table = {int(code): set(re.findall(r"`(\w+Error)`", " ".join(cells))) for code, *cells in rows("Exit codes")}
    codes: dict[int, set[str]] = {code: set() for code in _WITHOUT_ERROR}
    for name, error in error_types().items():
        codes.setdefault(error.exit_code, set()).add(name)
    assert table == codes


def test_every_cause_is_there_and_no_other() -> None:
    assert [row[0].strip("`") for row in rows("Causes of failures")] == list(get_args(Cause))


def test_every_alarm_is_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "trainer").rglob("*.py")]
    raised = {BEHIND} | {alarm for text in sources for alarm in _ALARM.findall(text)}
    assert {"loss_to_zero", "disk_full"} < raised
    assert raised <= {row[0].strip("`") for row in rows("Alarms, and what a person does")}


def test_every_row_says_what_to_do() -> None:
    for section in ("Exit codes", "Causes of failures"):
        assert all(len(row) == 4 and row[3].strip() for row in rows(section)), section
