"""The stages of the flow, one file each: plain functions that know nothing of Prefect.

A stage is idempotent and keyed by a fingerprint of what it depends on: what is done is skipped with a stage_skipped
event. ``run_stage`` is the one place that journals how a stage went.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.recovery import policy
from flows.runtime.context import FlowContext
from hlatctl.run.errors import HlatctlError, LaunchError, storage_errors


def run_stage(
    ctx: FlowContext,
    name: str,
    fingerprint: str,
    work: Callable[[], dict[str, Any]],
    *,
    done: Callable[[], str] = lambda: "",
) -> None:
    """Do a stage's work once; again, if its job ends in a way that a restart may help with (``recovery.*``).

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
    outputs = _do(ctx, name, fingerprint, work)
    wall_s = ctx.clock.monotonic_s() - start
    ctx.event("stage_finished", stage=name, fingerprint=fingerprint, wall_s=round(wall_s, 3), outputs=outputs)
    ctx.message(f"{name}: done in {wall_s:.1f} s")
    ctx.watch()


def _do(ctx: FlowContext, name: str, fingerprint: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do the work until it is done, or has failed in a way that no restart helps with; journal each failure."""
    ends: list[LaunchError] = []
    while True:
        try:
            with storage_errors():
                return work()
        except HlatctlError as error:
            decision = None
            if isinstance(error, LaunchError) and error.code:
                ends.append(error)
                decision = policy.decide_job(ends, ctx.config.recovery)
                error.message = f"{error.message}; {decision.why}"
            restart = decision is not None and decision.action == "restart"
            ctx.event(
                "stage_failed",
                stage=name,
                fingerprint=fingerprint,
                error=type(error).__name__,
                code=error.code,
                message=error.message,
                hint=error.hint,
                restart=restart,
            )
            if decision is None or not restart:
                raise
            ctx.message(f"{name}: {error.message}" + (f" in {decision.wait_s:g} s" if decision.wait_s else ""))
        ctx.pause(decision.wait_s)
        ctx.event("stage_started", stage=name, fingerprint=fingerprint)
