"""Report: write figures, tables and a page from the journal."""

from __future__ import annotations

import os
from typing import Any

from conf import fingerprint
from flows.runtime.context import FlowContext
from flows.stages import run_stage
from hlatctl.run.errors import HlatctlError

_STAGE, _FINISHED = "report", "finished"


def write_report(ctx: FlowContext) -> None:
    """Build the run's report."""
    from hlatctl.report.build import build

    def work() -> dict[str, Any]:
        return {"page": os.fspath(build(ctx.run))}

    run_stage(ctx, _STAGE, fingerprint.config_fingerprint(ctx.config), work)


def finish_report(ctx: FlowContext) -> None:
    """Rebuild the report after the run's last event, so that it says "finished" and has the final numbers.

    A run whose stage wrote no report, such as a simulated trial of a sweep, gets none here. An error must not fail the
    run.
    """
    from hlatctl.report.build import build

    stage = ctx.refresh().stages.get(_STAGE)
    if stage is None or stage.status != _FINISHED:
        return
    try:
        build(ctx.run)
    except HlatctlError as error:
        ctx.message(f"the report lacks the run's last event: {error.message}")
