"""`hlatctl verify-resume`: proves that a run's checkpoint continues as the run did."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, find_run, print_json, say, write
from hlatctl.run.errors import TrainingError

if TYPE_CHECKING:
    from flows.verify_resume import Comparison


def verify_resume(
    run: RunName,
    steps: Annotated[int, typer.Option(help="Steps to train again, at most.", min=1)] = 10,
    step: Annotated[
        int | None,
        typer.Option(help="The checkpoint's step.  [default: the newest with a checkpoint or steps after it]", min=0),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Prove that a run's checkpoint continues as the run did.

    Trains the steps after it again, on this machine or cluster, and compares each loss and gradient norm with the
    journal. If the run has a checkpoint of one of these steps, compares all weights and moments with it too. The run
    itself is only read. The exit code is 20 if they differ by more than rounding.
    """
    from flows.verify_resume import verify

    paths = find_run(run, runs_dir)
    found = verify(paths, most_steps=steps, step=step, say=say)
    if as_json:
        print_json({**dataclasses.asdict(found), "holds": found.holds})
    else:
        for condition in found.conditions:
            say(f"another condition: {condition}")
        _show(found)
    if not found.holds:
        raise TrainingError(
            f"run {paths.run_id}: the checkpoint of step {found.from_step} does not continue as the run did "
            f"({_failure(found)})",
            hint="check the machine (`hlatctl doctor`), the code and the data; `hlatctl show` has what the run used",
        )


def _show(found: Comparison) -> None:
    write(f"{found.equal} of {found.steps} steps are equal, to the last bit, after step {found.from_step}")
    if found.first_different is not None:
        write(f"the first that differs is step {found.first_different}")
        write(f"largest relative difference of a loss: {found.largest:.2g}, of a norm: {found.largest_norm:.2g}")
    if found.tensors_at is None:
        write("weights and moments were not compared: there is no checkpoint of these steps to compare with")
        return
    counted = f"{found.equal_tensors} of {found.tensors} tensors"
    write(f"{counted} are equal, to the last bit, after step {found.tensors_at}")
    if found.first_tensor is not None:
        write(f"the first that differs is {found.first_tensor}")
        write(f"largest relative difference of a tensor: {found.largest_tensor:.2g}")


def _failure(found: Comparison) -> str:
    """Return what differs too much, and the rule."""
    from flows.verify_resume import NORM_TOLERANCE, TENSOR_TOLERANCE, TOLERANCE

    if found.must_equal:
        first = found.first_different
        what = f"step {first} differs" if first is not None else f"tensor {found.first_tensor} differs"
        return f"{what}; must be equal to the last bit"
    limits = {"a loss": TOLERANCE, "a gradient norm": NORM_TOLERANCE, "a tensor": TENSOR_TOLERANCE}
    measured = zip(limits, (found.largest, found.largest_norm, found.largest_tensor), strict=True)
    return "; ".join(
        f"{what} differs by {value:.2g}, must be within {limits[what]:g}"
        for what, value in measured
        if value > limits[what]
    )
