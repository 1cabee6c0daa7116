"""What a simulated failure leaves: exit code, end of the log, error record.

These are the real traces of torchrun, the kernel and the trainer, so that a dry run tests
``flows.recovery.failure_causes``.
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
    """What a job leaves: its exit code, the end of its log, its error."""

    exit_code: int
    log: str = ""
    error: HlatctlError | None = None


def broken_device(host: str) -> Evidence:
    """Return the evidence of a failed device: the runtime aborts its process."""
    return Evidence(exit_code=1, log="nrt: device failure, aborting\n" + _SUMMARY.format(host=host, exitcode=_ABORTED))


def collective_timeout(host: str) -> Evidence:
    """Return the evidence of a collective's time-out; torchrun names the process that failed first."""
    log = f"[rank0]: RuntimeError: [{host}] Timed out waiting 300000ms for recv operation to complete\n"
    return Evidence(exit_code=1, log=log + _SUMMARY.format(host=host, exitcode=_FAILED))


def disk_full(run: RunPaths, step: int, needed_bytes: int) -> Evidence:
    """Return the evidence of a required checkpoint that doesn't fit on the disk."""
    error = StorageError(
        f"{run.checkpoint(step)}: needs {needed_bytes} bytes, 0 are free",
        hint="free space, then resume the run",
        code=DISK_FULL,
    )
    return Evidence(exit_code=error.exit_code, error=error)


def not_finite(step: int) -> Evidence:
    """Return the evidence of a step that is not finite."""
    error = TrainingError(
        f"step {step}: loss=nan, grad_norm=nan: not finite; the parameters are not updated with it",
        hint="lower optimizer.lr, or look at the steps before it in the journal",
        code=NONFINITE,
    )
    return Evidence(exit_code=error.exit_code, error=error)


def unfit(host: str, more: int) -> Evidence:
    """Return the evidence of a preflight that rejected a host and ``more`` others."""
    others = f"; and {more} more" if more else ""
    error = PreflightError(f"worker {host}: {UNFIT}{others}", hint="repair or replace the worker, or change the limit")
    return Evidence(exit_code=error.exit_code, error=error)


#: The failed check of a rejected host.
UNFIT = "its device does not answer (simulated)"
