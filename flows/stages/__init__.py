"""The stages of the flow, one file each: plain functions that don't depend on Prefect.

A stage is idempotent and has a fingerprint of everything that it depends on. If it is done, it is skipped with a
``stage_skipped`` event. Only ``run_stage`` journals the events of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.recovery import policy
from flows.runtime.context import FlowContext
from hlatctl.run.errors import HlatctlError, LaunchError, storage_errors, to_record


def run_stage(
    ctx: FlowContext,
    name: str,
    fingerprint: str,
    work: Callable[[], dict[str, Any]],
    *,
    done: Callable[[], str] = lambda: "",
) -> None:
    """Run a stage unless it is done, and restart it if the restart policy of jobs says so (``recovery.*``).

    Args:
        fingerprint: fingerprint of everything that the work depends on.
        work: does the work and returns its outputs, as JSON values.
        done: returns why the stage is done; empty: it isn't.
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
    """Do the work until it succeeds or must not be restarted; journal each failure."""
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
            fields: dict[str, Any] = to_record(error)
            fields["error"] = fields.pop("type")
            ctx.event("stage_failed", stage=name, fingerprint=fingerprint, restart=restart, **fields)
            if decision is None or not restart:
                raise
            ctx.message(f"{name}: {error.message}" + (f" in {decision.wait_s:g} s" if decision.wait_s else ""))
        ctx.pause(decision.wait_s)
        ctx.event("stage_started", stage=name, fingerprint=fingerprint)
