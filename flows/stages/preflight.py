"""Preflight: every worker shows that it is fit before training takes it; the node ledger keeps what it showed."""

from __future__ import annotations

import os
import shutil
from typing import Any

from conf import fingerprint
from flows.context import FlowContext
from flows.jobs import run_job
from flows.stages import run_stage
from hlatctl.run import files


def preflight(ctx: FlowContext) -> None:
    """Measure every worker; raises PreflightError naming the worker and the measure."""

    def work() -> dict[str, Any]:
        placement = ctx.place()
        if placement.message:
            ctx.message(f"nodes: {placement.message}")
        ctx.run.preflight.unlink(missing_ok=True)
        shutil.rmtree(ctx.run.preflight_nodes, ignore_errors=True)
        job = ctx.job("preflight", "-m", "trainer.preflight", "--run-dir", os.fspath(ctx.run.root), distributed=True)
        try:
            run_job(ctx, job, timeout_s=ctx.config.preflight.timeout_s)
        finally:
            _enter(ctx)
        return {
            "workers": len(files.read_json(ctx.run.preflight)["workers"]), "left_out_hosts": list(placement.left_out),
        }  # fmt: skip

    def done() -> str:
        # A head that takes over must neither slow what it looks after, nor measure nodes that are busy.
        return "training is running on the nodes" if ctx.training_lives() else ""

    run_stage(ctx, "preflight", fingerprint.hardware_fingerprint(ctx.config), work, done=done)


def _enter(ctx: FlowContext) -> None:
    """Put what each host showed into the node ledger; a job that died has left nothing."""
    if not ctx.run.preflight.is_file():
        return
    failures: dict[str, list[str]] = {}
    for worker in files.read_json(ctx.run.preflight)["workers"]:
        failures.setdefault(worker["host"], []).extend(worker["failures"])
    for host, found in failures.items():
        ctx.hold_against(host, "preflight_failed" if found else "preflight_passed", "; ".join(found))
