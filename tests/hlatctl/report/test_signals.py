"""Which tasks are informative: scores over milestones against guessing and noise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hlatctl.cli.main import main
from hlatctl.report.signals import signals, text
from hlatctl.run.state import MilestoneState
from tests.hlatctl.scored_runs import hlat_scores, scored_run


def milestone(tokens: int, *, chance: float | None = None, metric: str = "acc", **scores: Any) -> MilestoneState:
    found = MilestoneState(milestone_tokens=tokens, step=tokens, status="evaluated")
    found.scores = {
        name: {"metric": metric, "value": value, "stderr": error, "chance": chance}
        for name, (value, error) in scores.items()
    }
    return found


def test_a_task_speaks_if_its_newest_score_is_clear_of_guessing_and_scores_do_not_fall() -> None:
    def course(chance: float, *values: float) -> list[MilestoneState]:
        return [milestone(n, chance=chance, t=(value, 0.02)) for n, value in enumerate(values, 1)]

    (row,) = signals(course(0.25, 0.26, 0.29, 0.31))
    assert row.above == pytest.approx(3.0)
    assert row.rise == pytest.approx(0.05 / 0.02 / 2**0.5)
    assert row.order == pytest.approx(1.0)
    assert (row.milestones, row.speaks) == (3, True)
    (falling,) = signals(course(0.25, 0.36, 0.33, 0.30))
    assert falling.above == pytest.approx(2.5)
    assert falling.order == pytest.approx(-1.0)
    assert not falling.speaks
    (guessing,) = signals(course(0.30, 0.26, 0.29, 0.31))
    assert not guessing.speaks


def test_where_guessing_is_unknown_the_rise_decides() -> None:
    (row,) = signals([milestone(1, t=(0.2, 0.01)), milestone(2, t=(0.3, 0.01))])
    assert (row.chance, row.above, row.order, row.speaks) == (None, None, None, True)
    (same,) = signals([milestone(n, t=(0.2, 0.01)) for n in (1, 2, 3)])
    assert (same.rise, same.order, same.speaks) == (0.0, 0.0, False)
    (alone,) = signals([milestone(1, chance=0.0, t=(0.2, None))])
    assert (alone.above, alone.rise, alone.speaks) == (None, None, False)


def test_the_held_out_text_and_tasks_of_groups_are_no_rows() -> None:
    (row,) = signals([milestone(1, chance=0.25, mmlu=(0.3, 0.01), mmlu_law=(0.3, 0.01), validation_loss=(2.0, 0.1))])
    assert row.task == "mmlu"
    assert "1 of 1 have a signal" in text([row])


def test_less_is_better_for_bits_per_byte_which_stand_below_their_task() -> None:
    course = [milestone(n, metric="bits_per_byte", t=(0.2, 0.01), t_bpb=(1.2 - 0.1 * n, 0.02)) for n in (1, 2, 3)]
    task, bits = signals(course)
    assert (task.task, bits.task) == ("t", "t_bpb")
    assert bits.rise == pytest.approx(0.2 / 0.02 / 2**0.5)
    assert bits.order == pytest.approx(1.0)
    assert bits.speaks
    _, worse = signals(
        [milestone(n, metric="bits_per_byte", t=(0.2, 0.01), t_bpb=(1.0 + 0.1 * n, 0.02)) for n in (1, 2, 3)]
    )
    assert worse.order == pytest.approx(-1.0), "its bits rise"
    assert not worse.speaks


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored_run(tmp_path / "runs", "base", hlat_scores())
    where = ["--runs-dir", os.fspath(tmp_path / "runs")]
    assert main(["eval", "signal", "base", *where]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[:2]] == ["task", "mmlu"]
    assert main(["eval", "signal", "base", "--json", *where]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["task"], first["milestones"], first["first"], first["last"]) == ("mmlu", 2, 0.25, 0.413)
    assert first["rise"] == pytest.approx((0.413 - 0.25) / (0.0036**2 + 0.0041**2) ** 0.5)
    assert main(["eval", "signal", "absent", *where]) != 0
    assert "hint:" in capsys.readouterr().err
