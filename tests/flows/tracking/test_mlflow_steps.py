from __future__ import annotations

from pathlib import Path

import pytest

from flows.tracking.mlflow_steps import Counted, Shown
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths


@pytest.mark.parametrize(("total", "every"), [(306, 1), (100_000, 1), (100_001, 2), (430_000, 8), (2_000_000, 32)])
def test_a_long_run_has_its_first_steps_and_at_most_100_000_others(total: int, every: int) -> None:
    shown = Shown(total)
    assert shown.every == every
    assert [step for step in (1, 999, 1000, 1001, total) if shown.step(step)][-1] == total
    assert shown.step(999)
    assert shown.step(1001) == (every == 1)
    assert total // every <= 100_000


def test_lines_of_other_steps_need_not_be_read() -> None:
    shown = Shown(430_000)
    assert shown.line(b'{"kind":"step","step":2000,"loss":1.0}\n')
    assert not shown.line(b'{"kind":"step","step":2001,"loss":1.0}\n')
    assert shown.line(b'{"kind":"checkpoint_committed","step":2001}\n')


def test_steps_that_a_later_attempt_does_again_do_not_count(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    for attempt, resumed in ((1, 0), (2, 60), (3, 40)):
        with JournalWriter(run, train_writer(0), attempt) as journal:
            journal.append("train_started", resumed_from_step=resumed, tokens=0)
    counted = Counted(run, {})
    steps = [(attempt, step) for attempt in (1, 2, 3) for step in (40, 41, 60, 61)]
    assert [pair for pair in steps if counted({"attempt": pair[0], "step": pair[1]})] == [
        (1, 40), (2, 40), (3, 40), (3, 41), (3, 60), (3, 61),
    ]  # fmt: skip
