"""Evaluate: one milestone's checkpoint, exported and judged in processes of their own while training goes on."""

from __future__ import annotations

import os
import shutil

from flows.context import FlowContext
from flows.jobs import run_job
from hlatctl.run.errors import HlatctlError, StoppedError


def due_milestones(ctx: FlowContext) -> list[int]:
    """Milestones (tokens) that have been announced and not been evaluated; a resumed run tries failed ones again."""
    state = ctx.refresh()
    return sorted(m.milestone_tokens for m in state.milestones.values() if m.status != "evaluated")


def evaluate_milestone(ctx: FlowContext, milestone_tokens: int) -> str:
    """Judge a milestone's checkpoint, trying again after a failure; never raises what would stop training.

    Returns:
        The milestone's status: ``evaluated``, or ``failed``, or ``running`` if the run stops meanwhile.
    """
    tries = 1 + ctx.config.eval.max_retries
    for number in range(1, tries + 1):
        try:
            _evaluate_once(ctx, milestone_tokens, number)
            break
        except StoppedError:
            break
        except HlatctlError as error:
            step = ctx.state.milestones[milestone_tokens].step
            final = number == tries
            ctx.event("eval_failed", milestone_tokens=milestone_tokens, step=step, message=error.message, final=final)
            again = "given up" if final else "trying again"
            ctx.message(f"evaluation at {milestone_tokens:,} tokens failed, {again}: {error.message}")
    return ctx.refresh().milestones[milestone_tokens].status


def _evaluate_once(ctx: FlowContext, milestone_tokens: int, number: int) -> None:
    folder = ctx.run.eval(milestone_tokens)
    model = folder / "model"
    run_dir, step = os.fspath(ctx.run.root), str(ctx.state.milestones[milestone_tokens].step)
    ctx.message(f"evaluation at {milestone_tokens:,} tokens: started")
    if not (model / "config.json").is_file():
        export = ("-m", "trainer.export", "--run-dir", run_dir, "--step", step, "--to", os.fspath(model))
        run_job(ctx, ctx.job_beside_training(f"export-{milestone_tokens}", *export))
    judge = ("-m", "eval", "--run-dir", run_dir, "--milestone-tokens", str(milestone_tokens), "--step", step)
    job = ctx.job_beside_training(f"eval-{milestone_tokens}", *judge, "--model", os.fspath(model), "--try", str(number))
    run_job(ctx, job, reattach=True)
    shutil.rmtree(model, ignore_errors=True)
    scores = ctx.refresh().milestones[milestone_tokens].scores
    shown = ", ".join(f"{name} {score['value']:.3f}" for name, score in scores.items())
    ctx.message(f"evaluation at {milestone_tokens:,} tokens: {shown}")
