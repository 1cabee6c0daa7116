"""A sweep's study: what Optuna draws, the number by which trials are compared, and signs that a run diverges."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import Config, SweepConfig
from conf.space import parse
from flows.sweep.study import Study, divergence, objective
from hlatctl.run.errors import ConfigError
from hlatctl.run.fold import fold
from hlatctl.run.state import AttemptState, MilestoneState, RunState
from hlatctl.run.sweep import SweepState


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["train.tokens=800K", "train.global_batch_size=16", "train.seq_len=512", "eval.every_tokens=400K"])


def run_of(losses: list[float], norms: list[float] | None = None) -> RunState:
    events = [
        {
            "kind": "step",
            "attempt": 1,
            "seq": n,
            "time_unix_s": float(n),
            "step": n,
            "tokens": n * 8192,
            "loss": loss,
            "grad_norm": (norms or [1.0] * len(losses))[n - 1],
        }
        for n, loss in enumerate(losses, start=1)
    ]
    return fold(events)


def test_the_training_loss_is_the_mean_of_the_steps_before_each_rung(config: Config) -> None:
    aim = objective(SweepConfig(objective="loss"), config)
    rungs = aim.rungs(config, 4)
    assert rungs == [200704, 401408, 602112, 802816]
    losses = aim.values(run_of([float(n) for n in range(1, 60)]), rungs)
    assert losses == {200704: sum(range(6, 26)) / 20, 401408: sum(range(30, 50)) / 20}
    assert math.isnan(aim.values(run_of([1.0] * 10 + [math.nan] * 20), rungs)[200704])


def test_scores_are_taken_at_their_milestones(config: Config) -> None:
    state = RunState(
        milestones={
            400_000: MilestoneState(400_000, 49, scores={"validation_loss": {"value": 5.0}}),
            802_816: MilestoneState(802_816, 98, scores={"validation_loss": {"value": 4.0}, "piqa": {"value": 0.5}}),
        }
    )
    aim = objective(SweepConfig(), config)
    assert (aim.name, aim.minimize) == ("validation_loss", True)
    assert aim.values(state, aim.rungs(config, 8)) == {400_000: 5.0, 802_816: 4.0}
    early = objective(SweepConfig(objective="validation_loss@tokens=400K"), config)
    assert early.values(state, early.rungs(config, 8)) == {400_000: 5.0}
    task = objective(SweepConfig(objective="eval.piqa"), config)
    assert (task.minimize, task.values(state, task.rungs(config, 8))) == (False, {802_816: 0.5})
    assert objective(SweepConfig(objective="eval.piqa_bpb"), config).minimize


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("accuracy", [], "sweep.objective=accuracy: not known"),
        ("validation_loss", ["eval.enabled=false"], "no trial reports it, because eval.enabled=false"),
        ("eval.piqa@tokens=300K", [], "no trial reports it, there is no milestone of 300,000 tokens"),
        ("loss@tokens=9M", [], "no trial reports it, they end at 802,816 tokens"),
    ],
)
def test_an_objective_that_no_trial_reports_is_refused(
    name: str, overrides: list[str], message: str, config: Config
) -> None:
    config = compose(
        ["train.tokens=800K", "train.global_batch_size=16", "train.seq_len=512", "eval.every_tokens=400K", *overrides]
    )
    with pytest.raises(ConfigError) as caught:
        objective(SweepConfig(objective=name), config)
    assert message in caught.value.message


def test_a_loss_above_its_start_has_diverged_and_noise_has_not() -> None:
    assert divergence(run_of([5.0 + 0.1 * (n % 3) for n in range(60)])) == ""
    rises = [5.0 + 0.1 * (n % 3) for n in range(30)] + [6.0 + 0.1 * n for n in range(30)]
    assert divergence(run_of(rises)) == (
        "the loss of the last 20 steps, 7.950, is above that of the first, at most 5.200"
    )


def test_a_gradient_norm_that_keeps_growing_has_diverged_and_a_spike_has_not() -> None:
    growing = run_of([5.0] * 30, [1.0] * 5 + [1.5 + 0.1 * n for n in range(25)])
    growing.spikes = [{"kind": "gradient_spike", "step": 6, "grad_norm": 1.5, "mean": 1.0}]
    assert divergence(growing) == ("the gradient norm has grown for 24 steps, from a mean of 1 before step 6 to 3.9")
    growing.spikes = [{**growing.spikes[0], "length_steps": 3}]
    assert divergence(growing) == "", "it has ended"


def test_a_run_that_fails_at_a_loss_that_is_not_finite_has_diverged() -> None:
    state = RunState(status="failed", attempts=[AttemptState(1, {}, 0.0, cause="nonfinite", evidence="step 7: nan")])
    assert divergence(state) == "step 7: nan"
    state.status = "running"
    assert divergence(state) == "", "a rollback continues"


@pytest.mark.parametrize("seed", [0, 2**32, 2**64 - 1])
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_arms_are_drawn_with_every_seed_that_a_run_may_have(sampler: str, seed: int) -> None:
    space = parse(["optimizer.lr=interval(1e-4,1e-3)", "sweep.trials=3", f"sweep.sampler={sampler}"], Path("/"))
    study = Study(space, SweepState(sweep_id="s"), minimize=True, seed=seed, first_rung_tokens=1, path=None)
    assert 1e-4 <= float(study.draw(1)["optimizer.lr"]) <= 1e-3
