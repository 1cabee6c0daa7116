"""`hlatctl verify-resume`: proves that a run's checkpoint continues as the run did."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, find_run, print_json, say, write
from hlatctl.run.errors import TrainingError


def verify_resume(
    run: RunName,
    steps: Annotated[int, typer.Option(help="Steps to train again, at most.", min=1)] = 10,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint's step.  [default: the newest with steps after it]", min=0)
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Prove that a run's checkpoint continues as the run did.

    Trains the steps after it again, on this machine or cluster, and compares each loss and gradient norm with the
    journal. The run itself is only read. The exit code is 20 if they differ by more than rounding.
    """
    from flows.verify_resume import TOLERANCE, verify

    paths = find_run(run, runs_dir)
    found = verify(paths, most_steps=steps, step=step, say=say)
    if as_json:
        print_json({**dataclasses.asdict(found), "holds": found.holds})
    else:
        for condition in found.conditions:
            say(f"another condition: {condition}")
        write(f"{found.equal} of {found.steps} steps are equal, to the last bit, after step {found.from_step}")
        if found.first_different is not None:
            write(f"the first that differs is step {found.first_different}")
            write(f"largest relative difference of a loss: {found.largest:.2g}")
    if not found.holds:
        rule = "equal to the last bit" if found.must_equal else f"within {TOLERANCE:g}"
        raise TrainingError(
            f"run {paths.run_id}: the checkpoint of step {found.from_step} does not continue as the run did "
            f"(step {found.first_different} differs; must be {rule})",
            hint="check the machine (`hlatctl doctor`), the code and the data; `hlatctl show` has what the run used",
        )
