"""Report: write figures, tables and a page from the journal."""

from __future__ import annotations

import os
from typing import Any

from conf import fingerprint
from flows.runtime.context import FlowContext
from flows.stages import run_stage


def write_report(ctx: FlowContext) -> None:
    """Build the run's report."""
    from hlatctl.report.build import build

    def work() -> dict[str, Any]:
        return {"page": os.fspath(build(ctx.run))}

    run_stage(ctx, "report", fingerprint.config_fingerprint(ctx.config), work)
