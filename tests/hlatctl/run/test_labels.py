from __future__ import annotations

from pathlib import Path

import pytest

from hlatctl.run.errors import ConfigError
from hlatctl.run.fold import read_state
from hlatctl.run.labels import change, write_label
from hlatctl.run.paths import RunPaths
from hlatctl.units import tags_text


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    return run


def test_labels_are_what_their_changes_add_up_to(run: RunPaths) -> None:
    write_label(run, change(name="first", tags=["model=small", "keep"], note="begun"), by="ana")
    write_label(run, change(tags=["model=large"], untag=["keep"], note="spikes at 400"), by="ben")
    write_label(run, change(name=""), by="ben")
    labels = read_state(run).labels
    assert (labels.name, labels.tags) == ("", {"model": "large"})
    assert [(note.text, note.by) for note in labels.notes] == [("begun", "ana"), ("spikes at 400", "ben")]
    assert tags_text({"b": "", "a": "1"}) == "a=1 b"


def test_nothing_to_change_writes_nothing(run: RunPaths) -> None:
    write_label(run, change(), by="ana")
    assert not run.journal.exists()


def test_secrets_are_masked(run: RunPaths) -> None:
    write_label(run, change(note="see https://ana:hunter22@example.org"), by="ana")
    assert b"hunter22" not in (run.journal / "operator.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tags": ["=x"]}, "^tag = '=x': its key must be"),
        ({"tags": ["mlflow.user=x"]}, "reserved"),
        ({"tags": ["a=" + "x" * 251]}, "251 characters"),
        ({"name": "x" * 101}, "at most 100"),
        ({"name": "two\nlines"}, "control characters"),
        ({"note": "\x1b]0;title\x07"}, "control characters"),
    ],
)
def test_labels_that_break_a_rule_are_refused(arguments: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        change(**arguments)
