"""The table of events has every kind that the code writes, and the types of their fields decide what is damaged."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run.events import KINDS, OF_RUNS, TYPES, is_event, line_of
from hlatctl.run.files import DAMAGED

ROOT = Path(__file__).parents[3]
VALUES: dict[str, Any] = {"text": "a", "whole": 1, "number": 0.5, "flag": True, "list": [], "object": {}, "any": 1}


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "seq": 1, "time_unix_s": 0.0, "attempt": 1, "kind": kind, **fields}


def _whole(kind: str) -> dict[str, Any]:
    return _event(kind, **{name: VALUES[field.type] for name, field in KINDS[kind].fields.items()})


def test_every_kind_that_the_code_writes_has_a_row() -> None:
    written = re.compile(r'(?:journal\.append|\.event|note)\(\s*"([a-z_]+)"')
    sources = [path for room in ("flows", "hlatctl", "trainer", "eval") for path in (ROOT / room).rglob("*.py")]
    kinds = {kind for path in sources for kind in written.findall(path.read_text(encoding="utf-8"))}
    assert "eval_stopped" in kinds
    assert kinds <= KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_with_all_fields_of_its_kind_is_whole_and_any_other_type_is_damage(kind: str) -> None:
    event = _whole(kind)
    assert is_event(event)
    for name, field in KINDS[kind].fields.items():
        assert is_event({**event, name: None}) is not field.is_needed
        if TYPES[field.type][0]:
            assert not is_event({**event, name: object()})
            assert is_event({**event, name: "nan"}) is (field.type in ("number", "text"))


@pytest.mark.parametrize("kind", OF_RUNS)
def test_the_line_of_an_event_needs_only_the_fields_of_its_row(kind: str) -> None:
    assert "{" not in line_of(_whole(kind))
    with suppress(*DAMAGED):
        line_of(_event(kind))


def test_kinds_and_fields_of_newer_versions_are_whole() -> None:
    assert is_event(_event("expert_moved", step="three"))
    assert is_event(_event("warning", message="hot", celsius=[90]))
