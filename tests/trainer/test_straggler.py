"""A slow process is reported, although all processes take equally long for a step."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tests.trainer.conftest import EventsOf, MakeRun, Ranks

pytestmark = pytest.mark.processes


def test_the_slow_process_is_reported_and_not_the_one_that_waits(
    tmp_path: Path, make_run: MakeRun, ranks: Ranks, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "slow", cluster={"processes_per_node": 2}, recovery={"straggler_steps": 20})
    ranks(2, [{"work": "train", "run": os.fspath(run.root), "attempt": 1, "slow_s": 0.1}])
    (times,) = events_of(run, "rank_times")
    assert (times["step"], times["slowest_rank"]) == (20, 1)
    (straggler,) = events_of(run, "straggler")
    assert (straggler["rank"], straggler["host"]) == (1, platform.node())
