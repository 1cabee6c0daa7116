"""Checks for corruption: whom they blame, and what training and checkpoints see of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hlatctl.run.checkpoint import steps_in
from hlatctl.run.errors import TrainingError
from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.processes import node_name
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere, TrainRun
from trainer.checkpoint.shards import read_tensors
from trainer.model.decoder import Layer
from trainer.step.corruption import Finding, Replay, judge


def replays(count: int, *, stages: int = 1, slices: int = 1) -> list[Replay]:
    """Return equal replays of ranks in the order of the layout: stages, replicas, slices."""
    each = count // stages
    return [
        Replay(
            stage=rank // each,
            slice=rank % slices,
            shard=0,
            replica=rank % each // slices,
            device=f"cuda:{rank % 2}",
            weights=1,
            forward=2,
            backward=3,
            loss=4.0,
            output_norm=5.0,
            grad_norm=6.0,
        )
        for rank in range(count)
    ]


def with_changes(healthy: list[Replay], *ranks: int, **changes: Any) -> list[Replay]:
    return [replace(each, **changes) if rank in ranks else each for rank, each in enumerate(healthy)]


def found(first: list[Replay], second: list[Replay], *, per_node: int = 1, exactly: bool = True) -> Finding | None:
    return judge(first, second, [f"n{rank // per_node}" for rank in range(len(first))], exactly=exactly)


def blamed(finding: Finding | None) -> tuple[str, list[int], list[str]]:
    assert finding is not None
    return finding.part, finding.ranks, finding.blamed_hosts


@pytest.mark.parametrize("part", ["weights", "forward", "backward"])
def test_a_minority_is_blamed_and_of_two_replicas_neither_unless_they_share_a_node(part: str) -> None:
    assert found(replays(4), replays(4)) is None
    odd = with_changes(replays(3), 1, **{part: 9})
    assert blamed(found(odd, odd)) == (part, [1], ["n1"])
    two = with_changes(replays(2), 1, **{part: 9})
    assert blamed(found(two, two)) == (part, [0, 1], [])
    assert blamed(found(two, two, per_node=2)) == (part, [0, 1], ["n0"])
    four = with_changes(replays(4), 1, 3, **{part: 9})
    assert blamed(found(four, four)) == (part, [0, 1, 2, 3], [])


def test_a_process_that_does_not_reproduce_its_own_bits_is_blamed_without_a_majority() -> None:
    finding = found(with_changes(replays(2), 1, backward=9), replays(2))
    assert blamed(finding) == ("backward", [1], ["n1"])
    assert finding is not None
    assert finding.message == (
        "rank 1 (cuda:1 on n1) computed different gradients from the same tokens (in bits only), and doesn't reproduce "
        "its own numbers"
    )


def test_the_first_stage_that_differs_is_blamed_and_slices_of_several_nodes_are_not() -> None:
    stages = with_changes(replays(6, stages=2), 4, forward=9, loss=4.4)  # stage 1 of replica 1
    assert blamed(found(stages, stages)) == ("forward", [4], ["n4"])
    stages = with_changes(stages, 1, forward=9)
    finding = found(stages, stages)
    assert blamed(finding) == ("forward", [1], ["n1"])
    stages = with_changes(replays(6, stages=2), 1, 4, backward=9)
    assert blamed(found(stages, stages)) == ("backward", [4], ["n4"]), "the backward pass begins at the last stage"
    slices = with_changes(replays(6, slices=2), 2, 3, forward=9)
    assert blamed(found(slices, slices)) == ("forward", [2, 3], [])
    assert blamed(found(slices, slices, per_node=2)) == ("forward", [2, 3], ["n1"])


def test_another_device_than_a_cpu_may_round_differently_but_not_compute_other_numbers() -> None:
    healthy = with_changes(replays(3), 1, forward=9, backward=9, loss=4.001, grad_norm=6.01)
    assert found(healthy, healthy, exactly=False) is None, "another kernel"
    assert found(healthy, with_changes(healthy, 0, 1, backward=8), exactly=False) is None, "sums in another order"
    assert found(healthy, with_changes(healthy, 0, 1, forward=8), exactly=False) is None, "most processes do"
    assert blamed(found(healthy, with_changes(healthy, 1, forward=8), exactly=False)) == ("forward", [1], ["n1"])
    wrong = with_changes(healthy, 2, grad_norm=7.0)
    finding = found(wrong, wrong, exactly=False)
    assert blamed(finding) == ("backward", [2], ["n2"])
    assert finding is not None
    assert finding.difference == pytest.approx(1 / 6, rel=0.02)
    drifted = with_changes(replays(2), 1, weights=9)
    assert found(drifted, drifted, exactly=False) is None, "replicas of a weight that rounding has moved apart"
    lost = with_changes(replays(3), 2, grad_norm=float("nan"))
    finding = found(lost, lost, exactly=False)
    assert blamed(finding) == ("backward", [2], ["n2"])
    assert finding is not None
    assert finding.fields["difference"] is None
    nan = with_changes(replays(3), 0, 1, 2, loss=float("nan"), output_norm=float("nan"), grad_norm=float("nan"))
    assert found(nan, nan, exactly=False) is None, "all have diverged"


def test_training_with_checks_has_the_bits_of_training_without(train_run: TrainRun, events_of: EventsOf) -> None:
    runs = [
        train_run(recovery={"corruption_check_steps": every}, train={"micro_batch_size": 2}, checkpoint={"keep": 9})
        for every in (None, 5)
    ]
    checks = [[event["step"] for event in events_of(run, "corruption_checked")] for run in runs]
    assert checks == [[], [0, 5, 10, 15, 20, 24]]
    numbers = [[(e["loss"], e["grad_norm"], e["param_norm"]) for e in events_of(run, "step")] for run in runs]
    assert numbers[0] == numbers[1]
    plain, checked = (read_tensors(run.checkpoint(24), lambda _name: True) for run in runs)
    assert all(torch.equal(plain[name], checked[name]) for name in plain)
    ranks = [(run.checkpoint(24) / "ranks.json").read_text() for run in runs]
    assert ranks[0] == ranks[1], "the loader's position and the random state"


def test_wrong_numbers_end_the_attempt_and_the_last_trusted_checkpoint_is_kept_and_continued_from(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, calls = Layer._layer, [0]

    def broken(self: Layer, x: Tensor, *more: Any) -> Tensor:
        calls[0] += 1
        return layer(self, x, *more) * (1 + (calls[0] > 2 * 22) * calls[0] * 1e-5)

    monkeypatch.setattr(Layer, "_layer", broken)
    changes: dict[str, Any] = {"checkpoint": {"every_steps": 2, "keep": 1}, "recovery": {"corruption_check_steps": 8}}
    run = make_run(tmp_path / "wrong", **changes)
    with pytest.raises(TrainingError, match=r"after step 24: rank 0 \(cpu on .*doesn't reproduce"):
        train_here(run, 1)
    (event,) = events_of(run, "corruption_suspected")
    assert (event["step"], event["part"], event["blamed_hosts"]) == (24, "forward", [node_name()])
    assert fold(read_events(run)).trusted_step == 16
    assert {16, 22} <= set(steps_in(run.checkpoints)) <= {16, 20, 22}
    assert not (run.checkpoint(24)).exists(), "a check precedes the checkpoint of its step"
