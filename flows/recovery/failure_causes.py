"""Name the cause of an attempt's or a job's end, from its status, the error it left and the end of its log.

Pure: text and values in, a cause and one line of evidence out. ``flows.recovery.policy`` decides what follows. Our own
errors are classified by type and code, never by text. The patterns below are for the texts of other programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flows.launch.base import Status
from hlatctl.run.errors import DISK_FULL, NONFINITE, DataError, HlatctlError
from hlatctl.run.state import AttemptState

Cause = Literal[
    "finished",
    "stopped",
    "preempted",
    "rollback",
    "nonfinite",
    "data_error",
    "disk_full",
    "error",
    "hang",
    "out_of_memory",
    "collective_timeout",
    "killed",
    "crashed",
    "lost",
]

#: Causes that may be a node's fault.
NODE_CAUSES: frozenset[Cause] = frozenset({"hang", "collective_timeout", "killed", "lost"})
_SIGKILL = 9

_CAUSE_OF_CODE: dict[str, Cause] = {DISK_FULL: "disk_full", NONFINITE: "nonfinite"}
#: What PyTorch, NCCL, gloo and the system print, by cause; the first row with a matching exception counts.
_CAUSE_OF_EXCEPTION: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (
        "out_of_memory",
        re.compile(
            r"OutOfMemory|MemoryError|out of memory|can't allocate memory|Cannot allocate memory|RESOURCE_EXHAUSTED"
        ),
    ),
    ("disk_full", re.compile(r"No space left on device|Disk quota exceeded")),
    # A token that the embedding doesn't have, on CPU and CUDA.
    ("data_error", re.compile(r"index out of range in self|indexSelect\w*: .*Assertion|device-side assert triggered")),
    # gloo; NCCL's watchdog; the rendezvous store.
    (
        "collective_timeout",
        re.compile(
            r"Timed out waiting \d+ms for (send|recv) operation|collective operation timeout|"
            r"Watchdog caught collective|ProcessGroupNCCL's watchdog got stuck|wait timeout after \d+ms|Socket Timeout"
        ),
    ),
)
#: torchrun's prefix of a line: the process that wrote it.
_RANK_PREFIX = re.compile(r"^(\[[\w.]*\d+\]: ?)+")
#: torchrun's summary of a failure: a process's exit code (negative: a signal) and host.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")
_HOST = re.compile(r"^\s*host\s*:\s*(\S+)", re.MULTILINE)
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
#: What other processes, and torchrun itself, print after one has failed.
_SECONDARY = re.compile(r"ChildFailedError|Connection closed by peer|Connection reset by peer")
#: What may differ between two equal failures: addresses, paths, numbers.
_NOISE = ((r"0x[0-9a-fA-F]+", "<address>"), (r"(?<![\w<])/[^\s:'\",)]+", "<path>"), (r"\b\d+", "<n>"))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt or a job ended.

    Args:
        cause: ``stopped`` and ``preempted`` wrote a checkpoint after a request to stop, a person's or another's;
            ``rollback`` restarts without the batch of a step that was not finite; ``error`` left an error that a person
            must fix; ``killed`` ended by a signal; ``crashed`` by an exception; ``lost`` left no exit code.
        evidence: one line.
        signal: number of the signal that ended it; 0: none.
    """

    cause: Cause
    evidence: str
    exit_code: int | None = None
    signal: int = 0

    @property
    def signature(self) -> str:
        """Cause and evidence without what may differ between equal failures; a signal's number stays."""
        text = self.evidence
        for pattern, name in () if self.signal else _NOISE:
            text = re.sub(pattern, name, text)
        return f"{self.cause}: {text}"


def classify(
    *,
    status: Status,
    attempt: AttemptState,
    train_stopped: str,
    error: HlatctlError | None,
    log_tail: str,
    stop_requested: bool = False,
    oom_kills: int | None = None,
) -> Ending:
    """Return how an attempt ended.

    Args:
        status: of the ended job.
        attempt: its state in the journal.
        train_stopped: the reason in the trainer's last event, or empty.
        error: the error that the job left.
        log_tail: the last lines of its log.
        stop_requested: a person has asked the run to stop.
        oom_kills: processes that the nodes' kernels have killed so far because memory ran out; None: unknown.
    """
    code = status.exit_code
    if train_stopped == "finished":
        return Ending(cause="finished", evidence="the last step and its checkpoint are written", exit_code=code)
    if attempt.hang:
        return Ending(cause="hang", evidence=attempt.hang, exit_code=code)
    if error:
        evidence = f"{type(error).__name__}: {error.message}"
        return Ending(cause=_cause_of_error(error, attempt), evidence=evidence, exit_code=code)
    if train_stopped == "stop":
        cause: Cause = "stopped" if stop_requested else "preempted"
        return Ending(cause=cause, evidence="asked to stop; checkpoint written", exit_code=code)
    if train_stopped == "rollback":
        return Ending(cause="rollback", evidence="a step was not finite; its batch is excluded", exit_code=code)
    more_oom_kills = oom_kills is not None and attempt.oom_kills is not None and oom_kills > attempt.oom_kills
    return end_without_error(status, log_tail, more_oom_kills=more_oom_kills)


def end_without_error(status: Status, log_tail: str, *, more_oom_kills: bool) -> Ending:
    """Return how a job ended that left no error.

    Args:
        status: of the ended job.
        log_tail: the last lines of its log.
        more_oom_kills: the kernel has killed a process meanwhile because memory ran out.
    """
    code = status.exit_code
    if status.state == "lost":
        return Ending(cause="lost", evidence="the job's process is gone and left no exit code")
    signal, evidence = _fatal_signal(log_tail, code)
    if signal == _SIGKILL and more_oom_kills:
        evidence += ", and the kernel killed a process because memory ran out"
        return Ending(cause="out_of_memory", evidence=evidence, exit_code=code, signal=signal)
    exceptions = exception_lines(log_tail)
    for cause, pattern in _CAUSE_OF_EXCEPTION:
        matching = [line for line in exceptions if pattern.search(line)]
        if matching:
            return Ending(cause=cause, evidence=matching[-1][:500], exit_code=code)
    if signal:
        return Ending(cause="killed", evidence=evidence, exit_code=code, signal=signal)
    return Ending(cause="crashed", evidence=last_exception(log_tail), exit_code=code)


def _cause_of_error(error: HlatctlError, attempt: AttemptState) -> Cause:
    # Data that can't be read at the start is a person's to fix; later, it was readable before.
    if isinstance(error, DataError) and (attempt.last_step or attempt.resumed_from_step):
        return "data_error"
    return _CAUSE_OF_CODE.get(error.code, "error")


def _fatal_signal(log_tail: str, exit_code: int | None) -> tuple[int, str]:
    """Return the number of the signal that ended the first process to fail, and a sentence; 0 and empty: none."""
    codes = [int(code) for code in _EXIT_CODE.findall(log_tail.rpartition(_ROOT_CAUSE)[2])]
    if codes and codes[0] < 0:
        return -codes[0], f"a trainer process died of signal {-codes[0]}"
    if exit_code is not None and exit_code > 128:
        return exit_code - 128, f"the job died of signal {exit_code - 128}"
    return 0, ""


def failed_host(log_tail: str) -> str:
    """Return the host of the process that failed first, according to torchrun; empty: unknown."""
    hosts = _HOST.findall(log_tail.rpartition(_ROOT_CAUSE)[2])
    return str(hosts[0]) if hosts else ""


def exception_lines(log_tail: str) -> list[str]:
    """Return the lines that name an exception; those that only follow from another failure if there are no others."""
    lines = [_RANK_PREFIX.sub("", line).strip() for line in log_tail.splitlines()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return [line for line in named if not _SECONDARY.search(line)] or named


def last_exception(log_tail: str) -> str:
    """Return the last line that names an exception, or else the last line."""
    lines = [stripped for line in log_tail.splitlines() if (stripped := _RANK_PREFIX.sub("", line).strip())]
    return (exception_lines(log_tail) or lines or ["no output"])[-1][:500]
