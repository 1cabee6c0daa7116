"""Running a job to its end, and turning its failure into an error that a person can act on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from flows.context import FlowContext
from flows.endings import last_exception
from flows.launch.base import Job, Plan, Status
from hlatctl.run.errors import HlatctlError, LaunchError, StoppedError, load_error

#: How long a job that is cancelled may take to put its things in order.
CANCEL_GRACE_S = 5.0
_POLL_S = 0.1
_LOG_TAIL_BYTES = 8000
_LOG_TAIL_LINES = 12


def run_job(
    ctx: FlowContext, job: Job, *, timeout_s: float | None = None, reattach: bool = False,
    until: Callable[[], bool] | None = None,
) -> bool:  # fmt: skip
    """Submit a job and wait for it. An interrupt, or the time-out, cancels it.

    Args:
        timeout_s: cancel it after this long.
        reattach: wait for the same job that a dead head left running, instead of starting over.
        until: cancel it as soon as this holds.

    Returns:
        Whether it has run to its end; false if it was cancelled because ``until`` held.

    Raises:
        HlatctlError: the error that the job left behind.
        StoppedError: the run stops.
        LaunchError: it failed without one, timed out, or was lost; the message names its exception.
    """
    plan = ctx.launcher.render(job)
    handle = ctx.launcher.handle(plan)
    left_running = not ctx.launcher.status(handle).ended
    reattach = reattach and _is_submitted(plan)
    if left_running and not reattach:
        ctx.launcher.cancel(handle, grace_s=CANCEL_GRACE_S)
    if not (left_running and reattach):
        ctx.launcher.submit(plan)
    deadline = ctx.clock.monotonic_s() + timeout_s if timeout_s else float("inf")
    try:
        while not (status := ctx.launcher.status(handle)).ended:
            # Beside the thread that drives the flow nobody is shown anything.
            state = ctx.watch() if threading.current_thread() is threading.main_thread() else ctx.refresh()
            if ctx.cancelled.is_set() or (state.stop_requested and ctx.heeds_stop):
                raise StoppedError(f"job {job.name}: cut short because the run stops")
            if ctx.clock.monotonic_s() > deadline:
                raise LaunchError(f"job {job.name}: not finished after {timeout_s:g} s", hint=f"see {job.log}")
            if until and until():
                return False
            ctx.clock.wait_for_news(_POLL_S, job.name)
    finally:
        # Nothing of a job outlives it: an interrupt, a time-out, or children that its end left behind.
        ctx.launcher.cancel(handle, grace_s=CANCEL_GRACE_S)
    if status.state != "succeeded":
        raise job_error(job, status)
    return True


def _is_submitted(plan: Plan) -> bool:
    """Whether the newest job of this name runs exactly this script."""
    try:
        return plan.script_path.read_text(encoding="utf-8") == plan.script
    except OSError:
        return False


def job_error(job: Job, status: Status) -> HlatctlError:
    """The error that a failed job left behind, or else one that names its exception."""
    error = load_error(job.error_file)
    if error:
        return error
    how = "was lost" if status.exit_code is None else f"failed with exit code {status.exit_code}"
    return LaunchError(f"job {job.name}: {how} ({last_exception(log_tail(job.log))})", hint=f"see {job.log}")


def log_tail(path: Path, *, lines: int = _LOG_TAIL_LINES, size_bytes: int = _LOG_TAIL_BYTES) -> str:
    """The last lines of a log that are not blank, as far as they lie in its last bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size_bytes))
            found = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in found if line.strip()][-lines:])
