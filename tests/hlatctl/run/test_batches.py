"""The number of batches drawn at a checkpoint, from the journal or from a checkpoint of an older release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import files
from hlatctl.run.batches import batches_drawn
from hlatctl.run.errors import DamagedFileError
from hlatctl.run.paths import RunPaths


def _event(kind: str, step: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "attempt": attempt, **fields}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose checkpoint of step 20 says 25, as older releases store it."""
    run = RunPaths(tmp_path / "run")
    files.write_json(run.checkpoint(20) / "rank-00000.json", {"loader": [[25, 0, 0]], "rng": {}})
    return run


def test_no_batch_is_drawn_before_the_first_checkpoint(run: RunPaths) -> None:
    assert batches_drawn(run, 0, []) == 0


def test_the_journal_is_preferred_to_the_checkpoint(run: RunPaths) -> None:
    events = [_event("step", 19, batch=21), _event("step", 20, batch=22), _event("step", 21, batch=23)]
    assert batches_drawn(run, 20, events) == 22


def test_a_skipped_update_has_drawn_its_batch(run: RunPaths) -> None:
    assert batches_drawn(run, 20, [_event("nonfinite", 20, batch=22, action="skip")]) == 22


def test_the_attempt_that_wrote_the_checkpoint_counts(run: RunPaths) -> None:
    events = [
        _event("step", 20, attempt=1, batch=20),
        _event("checkpoint_committed", 20, attempt=1),
        _event("step", 20, attempt=2, batch=22),  # it died before it saved the step again
    ]
    assert batches_drawn(run, 20, events) == 20
    assert batches_drawn(run, 20, [*events, _event("checkpoint_committed", 20, attempt=2)]) == 22


@pytest.mark.parametrize("events", [[], [_event("step", 20), _event("checkpoint_committed", 20)]])
def test_without_the_number_in_the_journal_the_checkpoint_is_read(run: RunPaths, events: list[dict[str, Any]]) -> None:
    assert batches_drawn(run, 20, events) == 25


@pytest.mark.parametrize("content", ["{}", '{"loader": []}', "[", '{"loader": [["x"]]}'])
def test_a_number_that_is_nowhere_is_an_error_that_names_the_file(run: RunPaths, content: str) -> None:
    (run.checkpoint(20) / "rank-00000.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"step-00000020/rank-00000\.json: can't be used") as caught:
        batches_drawn(run, 20, [])
    assert caught.value.hint == "`hlatctl checkpoint verify run`"
