"""What a failure leaves behind: exit code, lines of the log, an error for a person.

In the words that torchrun, the kernel and the trainer use in reality, so that ``flows.recovery.failure_causes`` has to
find the cause by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from hlatctl.run.errors import DISK_FULL, NONFINITE, HlatctlError, PreflightError, StorageError, TrainingError
from hlatctl.run.paths import RunPaths

_SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
trainer FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  host      : {host}
  exitcode  : {exitcode} (pid: 4242)
============================================================
"""
_ABORTED, _FAILED = -6, 1


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a job ends.

    Args:
        log: its last lines.
        error: for a person.
    """

    exit_code: int
    log: str = ""
    error: HlatctlError | None = None


def broken_device(host: str) -> Evidence:
    """The runtime aborts a process whose device has failed."""
    return Evidence(exit_code=1, log="nrt: device failure, aborting\n" + _SUMMARY.format(host=host, exitcode=_ABORTED))


def collective_timeout(host: str) -> Evidence:
    """A process has waited for another in vain; torchrun names whichever gave up first."""
    said = f"[rank0]: RuntimeError: [{host}] Timed out waiting 300000ms for recv operation to complete\n"
    return Evidence(exit_code=1, log=said + _SUMMARY.format(host=host, exitcode=_FAILED))


def disk_full(run: RunPaths, step: int, needed_bytes: int) -> Evidence:
    """A checkpoint that must be written finds no room."""
    error = StorageError(
        f"{run.checkpoint(step)}: needs {needed_bytes} bytes, 0 are free",
        hint="free space, then resume the run",
        code=DISK_FULL,
    )
    return Evidence(exit_code=error.exit_code, error=error)


def not_finite(step: int) -> Evidence:
    """A step that must not be gone on with."""
    error = TrainingError(
        f"step {step}: loss=nan, grad_norm=nan: not finite; the parameters are not updated with it",
        hint="lower optimizer.lr, or look at the steps before it in the journal",
        code=NONFINITE,
    )
    return Evidence(exit_code=error.exit_code, error=error)


def unfit(host: str, more: int) -> Evidence:
    """A preflight that has found a host wanting."""
    others = f"; and {more} more" if more else ""
    error = PreflightError(
        f"worker {host}: {UNFIT}{others}", hint="mend or replace the worker, or set the threshold to what it can do"
    )
    return Evidence(exit_code=error.exit_code, error=error)


#: What an unfit host shows.
UNFIT = "its device does not answer (simulated)"
