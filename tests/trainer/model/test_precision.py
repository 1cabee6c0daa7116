"""Number formats: each trains, and weights have the right one."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere
from trainer.convert.export import read_weights

Train = Callable[[str], tuple[RunPaths, list[float]]]


@pytest.fixture(scope="module")
def train(
    tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> Train:
    @functools.cache
    def run(precision: str) -> tuple[RunPaths, list[float]]:
        paths = make_run(tmp_path_factory.mktemp(precision) / "run", precision={"name": precision})
        assert train_here(paths, 1) == 0
        return paths, [event["loss"] for event in events_of(paths, "step")]

    return run


@pytest.mark.parametrize("precision", ["mixed", "bf16_sr", "bf16"])
def test_lower_precision_follows_the_curve_of_fp32(precision: str, train: Train) -> None:
    run, losses = train(precision)
    _, exact = train("fp32")
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses != exact
    weights = read_weights(run, 24)
    expected = torch.float32 if precision == "mixed" else torch.bfloat16
    assert {weight.dtype for weight in weights.values()} == {expected}


def test_pure_bfloat16_is_warned_about(train: Train, events_of: EventsOf) -> None:
    run, _ = train("bf16")
    (warning,) = events_of(run, "warning")
    assert "the paper's runs diverged with it" in warning["message"]
    run, _ = train("bf16_sr")
    assert not events_of(run, "warning")


def test_stochastically_rounded_run_resumes_with_the_same_bits(
    tmp_path: Path, make_run: MakeRun, train: Train, train_here: TrainHere, events_of: EventsOf
) -> None:
    run, losses = train("bf16_sr")
    again = make_run(tmp_path / "again", precision={"name": "bf16_sr"})
    shutil.copytree(run.checkpoint(8), again.checkpoint(8))
    assert train_here(again, 2) == 0
    assert [event["loss"] for event in events_of(again, "step")] == losses[8:]
