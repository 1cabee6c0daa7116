"""How an attempt ended: the cause, from the job's end, what it left behind and the last lines of its log.

Pure: text and values in, a name and a sentence of evidence out. What follows from it is ``flows.recovery.policy``'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flows.launch.base import Status
from hlatctl.run.errors import DataError, HlatctlError, StorageError, TrainingError
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

#: Causes that may be a node's fault; the rest are the program's, the data's or somebody's wish.
NODE_CAUSES: frozenset[Cause] = frozenset({"hang", "collective_timeout", "killed", "lost"})
_SIGKILL = 9

#: How torchrun marks a line with the process it comes from.
_RANK_PREFIX = re.compile(r"^(\[[\w.]*\d+\]: ?)+")
#: How torchrun's summary of a failure names a process's end; negative is a signal.
_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")
_HOST = re.compile(r"^\s*host\s*:\s*(\S+)", re.MULTILINE)
_ROOT_CAUSE = "Root Cause (first observed failure)"
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
#: What other processes say when one has failed; torchrun's own end.
_SECONDARY = re.compile(r"ChildFailedError|Connection closed by peer|Connection reset by peer")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemory|MemoryError|out of memory|can't allocate memory|Cannot allocate memory|RESOURCE_EXHAUSTED"
)
#: gloo; NCCL's watchdog; the rendezvous store.
_COLLECTIVE_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms for (send|recv) operation|collective operation timeout|"
    r"Watchdog caught collective|ProcessGroupNCCL's watchdog got stuck|wait timeout after \d+ms|Socket Timeout"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|needs \d+ bytes, \d+ are free")
#: A token that the embedding does not have, on CPU and CUDA.
_BAD_TOKEN = re.compile(r"index out of range in self|indexSelect\w*: .*Assertion|device-side assert triggered")
#: What differs between two failures that are the same: addresses, paths, numbers (a signal's is its name).
_NOISE = ((r"0x[0-9a-fA-F]+", "<address>"), (r"(?<![\w<])/[^\s:'\",)]+", "<path>"), (r"(?<!signal )\b\d+", "<n>"))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended.

    Args:
        cause: ``stopped`` and ``preempted`` wrote a checkpoint because they were asked to, by a person of ours or not;
            ``rollback`` met a step that was not finite and wants to go back without that step's batch; ``error`` left
            an error that a person must mend; ``killed`` died of a signal; ``crashed`` of an exception; ``lost`` is
            gone without a trace.
        evidence: what says so, in one line.
    """

    cause: Cause
    evidence: str
    exit_code: int | None = None

    @property
    def signature(self) -> str:
        """The same for two failures that are the same: cause and evidence without addresses, paths, numbers."""
        text = self.evidence
        for pattern, name in _NOISE:
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
    """Name the cause of an attempt's end.

    Args:
        status: of the ended job.
        attempt: what the journal says of it.
        train_stopped: the reason in the trainer's last event, or empty.
        error: what the job left behind for a person.
        log_tail: the last lines of its log.
        stop_requested: somebody has asked the run to stop.
        oom_kills: processes that its nodes' kernels have killed so far for want of memory; none if it isn't known.
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
        return Ending(cause="rollback", evidence="a step was not finite; its batch is left out", exit_code=code)
    if status.state == "lost":
        return Ending(cause="lost", evidence="the job's process is gone and left no exit code")
    more_oom_kills = oom_kills is not None and attempt.oom_kills is not None and oom_kills > attempt.oom_kills
    cause, evidence = _from_log(log_tail, code, out_of_memory_killer=more_oom_kills)
    return Ending(cause=cause, evidence=evidence, exit_code=code)


def is_full(message: str) -> bool:
    """Whether an error's message is that of a full disk."""
    return _NO_SPACE.search(message) is not None


def cause_of_job(status: Status, log_tail: str, *, more_oom_kills: bool) -> Cause:
    """Name the cause of the end of a job that left no error, other than a training attempt."""
    if status.state == "lost":
        return "lost"
    return _from_log(log_tail, status.exit_code, out_of_memory_killer=more_oom_kills)[0]


def _cause_of_error(error: HlatctlError, attempt: AttemptState) -> Cause:
    if isinstance(error, StorageError) and is_full(error.message):
        return "disk_full"
    # What can't be read at the start is the person's; in the middle it was readable before.
    if isinstance(error, DataError) and (attempt.last_step or attempt.resumed_from_step):
        return "data_error"
    return "nonfinite" if isinstance(error, TrainingError) else "error"


def _from_log(log_tail: str, exit_code: int | None, *, out_of_memory_killer: bool) -> tuple[Cause, str]:
    """Cause and evidence of an end that only the log tells of."""
    exception = last_exception(log_tail)
    signal = _fatal_signal(log_tail, exit_code)
    if signal and signal[0] == _SIGKILL and out_of_memory_killer:
        return "out_of_memory", f"{signal[1]}, and the kernel has killed a process for want of memory"
    patterns: tuple[tuple[Cause, re.Pattern[str]], ...] = (
        ("out_of_memory", _OUT_OF_MEMORY),
        ("disk_full", _NO_SPACE),
        ("data_error", _BAD_TOKEN),
        ("collective_timeout", _COLLECTIVE_TIMEOUT),
    )
    for cause, pattern in patterns:
        found = [line for line in exception_lines(log_tail) if pattern.search(line)]
        if found:
            return cause, found[-1][:500]
    if signal:
        return "killed", signal[1]
    return "crashed", exception


def _fatal_signal(log_tail: str, exit_code: int | None) -> tuple[int, str] | None:
    """Number and sentence of the signal that ended the first process to fail."""
    codes = [int(found) for found in _EXIT_CODE.findall(log_tail.rpartition(_ROOT_CAUSE)[2])]
    if codes and codes[0] < 0:
        return -codes[0], f"a trainer process died of signal {-codes[0]}"
    if exit_code is not None and exit_code > 128:
        return exit_code - 128, f"the job died of signal {exit_code - 128}"
    return None


def failed_host(log_tail: str) -> str:
    """The host of the process that failed first, as torchrun names it; empty if it names none."""
    found = _HOST.findall(log_tail.rpartition(_ROOT_CAUSE)[2])
    return str(found[0]) if found else ""


def exception_lines(log_tail: str) -> list[str]:
    """The lines of a log that name an exception; what others say of a process that failed only if there is no more."""
    lines = [_RANK_PREFIX.sub("", line).strip() for line in log_tail.splitlines()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return [line for line in named if not _SECONDARY.search(line)] or named


def last_exception(log_tail: str) -> str:
    """The line of a log that names the exception, or else its last line."""
    lines = [stripped for line in log_tail.splitlines() if (stripped := _RANK_PREFIX.sub("", line).strip())]
    return (exception_lines(log_tail) or lines or ["no output"])[-1][:500]
