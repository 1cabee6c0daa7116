"""The stages of the flow, one file each: plain functions that know nothing of Prefect.

A stage is idempotent and keyed by a fingerprint of what it depends on: what is done is skipped with a stage_skipped
event. ``run_stage`` is the one place that journals how a stage went.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.context import FlowContext
from hlatctl.run.errors import HlatctlError


def run_stage(
    ctx: FlowContext,
    name: str,
    fingerprint: str,
    work: Callable[[], dict[str, Any]],
    *,
    done: Callable[[], str] = lambda: "",
) -> None:
    """Do a stage's work once.

    Args:
        name: of the stage.
        fingerprint: of what the work depends on.
        work: does it and returns what is worth telling, as JSON values.
        done: why nothing is to be done; empty if something is.
    """
    why = done()
    if why:
        ctx.event("stage_skipped", stage=name, fingerprint=fingerprint, why=why)
        ctx.message(f"{name}: skipped, {why}")
        ctx.watch()
        return
    ctx.event("stage_started", stage=name, fingerprint=fingerprint)
    ctx.watch()
    start = ctx.clock.monotonic_s()
    try:
        outputs = work()
    except HlatctlError as error:
        ctx.event(
            "stage_failed", stage=name, fingerprint=fingerprint,
            error=type(error).__name__, message=error.message, hint=error.hint,
        )  # fmt: skip
        raise
    wall_s = ctx.clock.monotonic_s() - start
    ctx.event("stage_finished", stage=name, fingerprint=fingerprint, wall_s=round(wall_s, 3), outputs=outputs)
    ctx.message(f"{name}: done in {wall_s:.1f} s")
    ctx.watch()
