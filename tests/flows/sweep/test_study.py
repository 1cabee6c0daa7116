"""What Optuna draws for a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.space import parse
from flows.sweep.study import Study
from hlatctl.run.sweep import SweepState


@pytest.mark.parametrize("seed", [0, 2**32, 2**64 - 1])
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_arms_are_drawn_with_every_seed_that_a_run_may_have(sampler: str, seed: int) -> None:
    space = parse(["optimizer.lr=interval(1e-4,1e-3)", "sweep.trials=3", f"sweep.sampler={sampler}"], Path("/"))
    study = Study(space, SweepState(sweep_id="s"), minimize=True, seed=seed, first_rung_tokens=1, path=None)
    assert 1e-4 <= float(study.draw(1)["optimizer.lr"]) <= 1e-3
