"""Which steps count."""

from __future__ import annotations

from pathlib import Path

from flows.tracking.mirrors.base import Attempts
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.mirrors.make import make_run, train


def test_a_step_counts_unless_a_later_attempt_repeats_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, 1, 10)
    train(run, 6, 8, attempt=2)
    train(run, 4, 5, attempt=3)
    attempts = Attempts.of(run)
    assert attempts.newest == 3

    def last(attempt: int) -> int:
        return max(step for step in range(1, 11) if attempts.counts({"attempt": attempt, "step": step}))

    assert [last(1), last(2), last(3)] == [3, 3, 10]
    attempts.add({"attempt": 4, "resumed_from_step": 2})
    assert [last(1), last(3), last(4)] == [2, 2, 10]


def test_steps_that_a_later_attempt_does_again_do_not_count(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    for attempt, resumed in ((1, 0), (2, 60), (3, 40)):
        with JournalWriter(run, train_writer(0), attempt) as journal:
            journal.append("train_started", resumed_from_step=resumed, tokens=0)
    attempts = Attempts.of(run)
    steps = [(attempt, step) for attempt in (1, 2, 3) for step in (40, 41, 60, 61)]
    assert [pair for pair in steps if attempts.counts({"attempt": pair[0], "step": pair[1]})] == [
        (1, 40), (2, 40), (3, 40), (3, 41), (3, 60), (3, 61),
    ]  # fmt: skip
