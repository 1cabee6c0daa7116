"""Preflight: every worker shows that it is fit before training takes it."""

from __future__ import annotations

import os
from typing import Any

from conf import fingerprint
from flows.context import FlowContext
from flows.jobs import run_job
from flows.stages import run_stage
from hlatctl.run import files


def preflight(ctx: FlowContext) -> None:
    """Measure every worker; raises PreflightError naming the worker and the measure."""

    def work() -> dict[str, Any]:
        job = ctx.job("preflight", "-m", "trainer.preflight", "--run-dir", os.fspath(ctx.run.root), distributed=True)
        run_job(ctx, job, timeout_s=ctx.config.preflight.timeout_s)
        return {"workers": len(files.read_json(ctx.run.preflight)["workers"])}

    run_stage(ctx, "preflight", fingerprint.hardware_fingerprint(ctx.config), work)
