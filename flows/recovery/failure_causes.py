"""Finds the cause of an attempt's or a job's end, from its status, the error it left and the end of its log.

Pure: takes text and values, and returns a cause and one line of evidence. ``flows.recovery.policy`` decides what
follows. Errors of hlatctl are classified by type and code, never by text. The patterns below match texts of other
programs.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from flows.launch.base import Status, Verdict
from hlatctl.run.errors import DISK_FULL, NONFINITE, NONFINITE_WEIGHTS, STORAGE_AWAY, DataError, HlatctlError
from hlatctl.run.state import AttemptState
from hlatctl.units import host_names

Cause = Literal[
    "finished",
    "stopped",
    "budget",
    "preempted",
    "reclaimed",
    "time_limit",
    "cancelled",
    "rollback",
    "amended",
    "stage",
    "evaluation",
    "nonfinite",
    "nonfinite_weights",
    "data_error",
    "storage_away",
    "disk_full",
    "error",
    "hang",
    "out_of_memory",
    "shared_memory",
    "system_limit",
    "device_failed",
    "network",
    "collective_timeout",
    "corruption",
    "port_in_use",
    "node_failed",
    "killed",
    "crashed",
    "lost",
]

#: Causes that may be the fault of a node.
NODE_CAUSES: frozenset[Cause] = frozenset(
    {
        "node_failed",
        "hang",
        "collective_timeout",
        "corruption",
        "killed",
        "lost",
        "device_failed",
        "network",
        "nonfinite_weights",
        "shared_memory",
    }
)
#: What a scheduler's verdict means; ``on`` names the hosts to blame.
_VERDICTS: dict[Verdict, str] = {
    "node_failed": "the hardware or system failed{on}",
    "time_limit": "the job reached its time limit",
    "preempted": "the scheduler took the nodes for another job",
    "out_of_memory": "the kernel killed a process because memory ran out{on}",
    "cancelled": "the job was cancelled",
}

_CAUSE_OF_CODE: dict[str, Cause] = {
    DISK_FULL: "disk_full",
    NONFINITE: "nonfinite",
    NONFINITE_WEIGHTS: "nonfinite_weights",
    STORAGE_AWAY: "storage_away",
}
#: Texts of PyTorch, NCCL, gloo, CUDA, Neuron and the system, by cause; the first row with a matching line counts.
#: CUDA's are those of cudaGetErrorString, Neuron's those of nrt_status.h (awsdocs-neuron.readthedocs-hosted.com,
#: neuron-runtime/api/nrt_status.html).
_CAUSE_OF_EXCEPTION: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (
        "device_failed",
        re.compile(
            r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus|hardware stack error|"
            r"CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected|"
            r"Unable to determine the device handle|NRT_EXEC_UNIT_UNRECOVERABLE|NRT_HW_ERROR|"
            r"NRT_EXEC_HW_ERR_(?!COLLECTIVES)|nrt_\w+:? status=(6|101|1201|1202|1203|1205)\b"
        ),
    ),
    # /dev/shm: PyTorch's storages, its loader's workers, NCCL's transport (github.com/NVIDIA/nccl/issues/525).
    (
        "shared_memory",
        re.compile(
            r"unable to (write to|open|resize|mmap|allocate) .*(</torch_|shared memory)|out of shared memory|"
            r"shared memory segment|/dev/shm/"
        ),
    ),
    (
        "out_of_memory",
        re.compile(
            r"OutOfMemory|MemoryError|out of memory|can't allocate memory|Cannot allocate memory|RESOURCE_EXHAUSTED|"
            r"NRT_RESOURCE|NRT_FAIL_HOST_MEM_ALLOC|nrt_\w+:? status=(4|11)\b"
        ),
    ),
    ("disk_full", re.compile(r"No space left on device|Disk quota exceeded")),
    (
        "system_limit",
        re.compile(
            r"Too many open files|Resource temporarily unavailable|can't start new thread|File too large|"
            r"File size limit exceeded"
        ),
    ),
    # A token that the embedding doesn't have, on CPU and CUDA.
    ("data_error", re.compile(r"index out of range in self|indexSelect\w*: .*Assertion|device-side assert triggered")),
    # On the first node. Another job can occupy the port; the next job gets another one.
    ("port_in_use", re.compile(r"EADDRINUSE|[Aa]ddress already in use")),
    # gloo; NCCL's watchdog; the rendezvous store; Neuron's collectives.
    (
        "collective_timeout",
        re.compile(
            r"Timed out waiting \d+ms for (send|recv) operation|collective operation timeout|"
            r"Watchdog caught collective|ProcessGroupNCCL's watchdog got stuck|wait timeout after \d+ms|Socket Timeout|"
            r"NRT_TIMEOUT|NRT_EXEC_HW_ERR_COLLECTIVES|nrt_\w+:? status=(5|1200)\b"
        ),
    ),
    # Names of hosts; InfiniBand and EFA (github.com/NVIDIA/nccl/issues/1405 and 1928); Neuron's proxy.
    (
        "network",
        re.compile(
            r"gaierror|Temporary failure in name resolution|Name or service not known|host not found|No route to host|"
            r"Network is (unreachable|down)|NET/IB\w* ?: ?Got completion from peer|NET/OFI .*completed with error|"
            r"client socket has timed out|NRT_NETWORK_PROXY_FAILURE|nrt_\w+:? status=1206\b"
        ),
    ),
)
#: Causes that a process may also report because another one has failed.
_MAYBE_SECONDARY: frozenset[Cause] = frozenset({"collective_timeout", "network"})
#: Slurm's text after a task has failed, or after an option it doesn't know: the line before has the reason.
_SRUN_SUMMARY = re.compile(
    r"srun: error: .*(Exited with exit code|Terminated|Killed)|srun: (Terminating|launch/slurm)|Try \"srun|"
    r"slurmstepd\S*: error: \*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED"
)
#: Prefixes of a line that name its process: ours ("[rank9]: "), and those of torchrun ("[default0]:").
_RANK_PREFIX = re.compile(r"^(\[[\w.]*\d+\]: ?)+")
#: torchrun's summary of a failure: a process's exit code (negative: a signal) and host.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_OF_FAILURE = re.compile(r"\s*(time|host|exitcode)\s*:\s*(\S+)")
_SEEN, _LONG_AGO = "%Y-%m-%d_%H:%M:%S", "1970-01-01_00:00:00"
#: torchrun gives the other processes 30 s to end.
_KILL_AFTER = timedelta(seconds=20)
#: Python's standard library also has names in small letters, such as socket.gaierror.
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|\w[\w.]*\.\w*error:")
#: Texts that other processes, and torchrun itself, print after one has failed: gloo's, NCCL's
#: (github.com/NVIDIA/nccl/issues/2076 and 1514), and the store's.
_SECONDARY = re.compile(
    r"ChildFailedError|Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|ncclRemoteError|"
    r"remote process exited or there was a network error|failed to recv, got 0 bytes|recvValue failed|"
    r"Application timeout caused pair closure"
)
#: Lines of errors that are no exceptions of Python: C++ ("what():"), PyTorch's and glog's log ("[E1127 ..."), NCCL's
#: and Neuron's. They count only if their text is known.
_LOGGED_ERROR = re.compile(r"what\(\):|\[E\d* |.*NCCL WARN |.*\bERROR\b")
#: The line before NCCL's own text in an exception.
_LAST_ERROR = "Last error:"
#: Lines of an exception of NCCL that its own text explains (github.com/NVIDIA/nccl/issues/1514).
_OF_NCCL = re.compile(r".*NCCL error in: |nccl\w+Error: ")
#: What may differ between two equal failures: addresses, paths, numbers.
_NOISE = ((r"0x[0-9a-fA-F]+", "<address>"), (r"(?<![\w<])/[^\s:'\",)]+", "<path>"), (r"\b\d+", "<n>"))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt or a job ended.

    Args:
        cause: ``stopped`` wrote a checkpoint after a person's request to stop, ``budget`` after its budget was used up;
            ``preempted`` and ``time_limit`` were
            ended by the scheduler, with a last checkpoint or without; ``cancelled`` by somebody else; ``rollback``
            restarts without the batch of a step that was not finite; ``amended`` ends so that an amendment begins,
            and ``stage`` so that the next stage does;
            ``error`` left an error that a person must fix; ``storage_away`` could not read the corpus in object
            storage; ``corruption`` found a process that computes wrong numbers; ``nonfinite_weights`` found weights
            that were not finite before a step; ``device_failed`` has a device that reports a fault of its hardware;
            ``system_limit`` reached a limit of the system, such as open files; ``shared_memory`` filled /dev/shm;
            ``network`` could not resolve a name or use a link; ``port_in_use`` could not connect its processes;
            ``node_failed`` lost a node, according to the scheduler; ``killed`` ended by a signal;
            ``crashed`` by an exception; ``lost`` left no exit code.
        evidence: one line.
        signal: number of the signal that ended it; 0: none.
        hosts: hosts to blame, if it may be the fault of a node and the launcher names them.
    """

    cause: Cause
    evidence: str
    exit_code: int | None = None
    signal: int = 0
    hosts: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """Cause, evidence and hosts without what may differ between equal failures; a signal's number is included."""
        text = self.evidence
        for pattern, name in () if self.signal else _NOISE:
            text = re.sub(pattern, name, text)
        return f"{self.cause}: {text}{_on(self.hosts)}"


def _on(hosts: Sequence[str]) -> str:
    return f" ({', '.join(hosts)})" if hosts else ""


def without_hosts(signature: str, hosts: Sequence[str]) -> str:
    """Return a signature without the hosts that it blames."""
    return signature.removesuffix(_on(hosts))


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
        train_stopped: the reason in the trainer's last event, or empty.
        oom_kills: processes that the nodes' kernels have killed so far because memory ran out; None: unknown.
    """
    code, verdict = status.exit_code, status.verdict
    if train_stopped == "finished":
        return Ending(cause="finished", evidence="the last step and its checkpoint are written", exit_code=code)
    if attempt.notice and not stop_requested:  # whatever else the nodes report while they are taken away
        saved = "checkpoint written" if train_stopped else "it ended before it could write a checkpoint"
        return Ending(cause="reclaimed", evidence=f"{attempt.notice}; {saved}", exit_code=code)
    if attempt.corruption:  # first: what its processes do after that finding means little
        return Ending(cause="corruption", evidence=attempt.corruption, exit_code=code)
    # The flow ends a hanging job, so the scheduler reports it as cancelled.
    if attempt.hang and verdict != "node_failed":
        if not train_stopped:
            return Ending(cause="hang", evidence=attempt.hang, exit_code=code)
        status, verdict, error = dataclasses.replace(status, verdict=""), "", None  # training had stopped before
    if error and not verdict:
        evidence = f"{type(error).__name__}: {error.message}"
        return Ending(cause=_cause_of_error(error, attempt), evidence=evidence, exit_code=code)
    if train_stopped == "amend" and not stop_requested:
        return Ending(cause="amended", evidence="ended for an amendment; checkpoint written", exit_code=code)
    if train_stopped in ("stop", "amend"):
        cause: Cause = "stopped" if stop_requested else verdict or "preempted"
        asked = "asked to stop" if stop_requested else verdict_in_words(status) or "asked to stop"
        return Ending(cause=cause, evidence=f"{asked}; checkpoint written", exit_code=code)
    if train_stopped == "rollback":
        return Ending(cause="rollback", evidence="a step was not finite; its batch is excluded", exit_code=code)
    more_oom_kills = oom_kills is not None and attempt.oom_kills is not None and oom_kills > attempt.oom_kills
    return end_without_error(status, log_tail, more_oom_kills=more_oom_kills)


def end_without_error(status: Status, log_tail: str, *, more_oom_kills: bool) -> Ending:
    """Return how a job ended that left no error.

    Args:
        more_oom_kills: the kernel has killed a process during the job because memory ran out.
    """
    code = status.exit_code
    if status.verdict:
        return Ending(cause=status.verdict, evidence=verdict_in_words(status), exit_code=code)
    if status.state == "lost":
        return Ending(cause="lost", evidence=status.reason or "the job's process is gone and left no exit code")
    fatal, evidence = _fatal_signal(log_tail, code)
    if fatal == signal.SIGKILL and more_oom_kills:
        evidence += ", and the kernel killed a process because memory ran out"
        return Ending(cause="out_of_memory", evidence=evidence, exit_code=code, signal=fatal)
    exceptions = exception_lines(log_tail)
    for cause, pattern in _CAUSE_OF_EXCEPTION:
        matching = [line for line in exceptions if pattern.search(line)]
        if matching:
            return Ending(cause=cause, evidence=matching[-1][:500], exit_code=code)
    if fatal:
        return Ending(cause="killed", evidence=evidence, exit_code=code, signal=fatal)
    return Ending(cause="crashed", evidence=last_exception(log_tail), exit_code=code)


def verdict_in_words(status: Status) -> str:
    """Return the scheduler's verdict on a job's end in words; empty if it has none."""
    if not status.verdict:
        return ""
    on = f" on {host_names(status.blamed_hosts)}" if status.blamed_hosts else ""
    # The reasons of other ends only repeat the exit code.
    reason = f" ({status.reason})" if status.verdict == "node_failed" and status.reason not in ("", "None") else ""
    return _VERDICTS[status.verdict].format(on=on) + reason


def _cause_of_error(error: HlatctlError, attempt: AttemptState) -> Cause:
    # A person must fix data that can't be read at the start; later, it was readable before.
    if isinstance(error, DataError) and error.code != STORAGE_AWAY and (attempt.last_step or attempt.resumed_from_step):
        return "data_error"
    return _CAUSE_OF_CODE.get(error.code, "error")


def _fatal_signal(log_tail: str, exit_code: int | None) -> tuple[int, str]:
    """Return the signal that ended the first process to fail, and a sentence about it; 0 and empty: none."""
    first = _first_failure(log_tail)
    if first and first.exit_code < 0:
        return -first.exit_code, f"a trainer process died of signal {-first.exit_code}"
    if exit_code is not None and exit_code > 128:
        return exit_code - 128, f"the job died of signal {exit_code - 128}"
    return 0, ""


@dataclass(frozen=True)
class _Failure:
    """A process in torchrun's summary of a node, with the second when its end was seen; ``is_first``: by torchrun."""

    host: str
    seen: datetime
    exit_code: int
    is_first: bool

    @property
    def was_killed(self) -> bool:
        """Return whether it died of a signal that no other process causes, as torchrun and an abort do."""
        return self.exit_code < 0 and -self.exit_code not in (signal.SIGTERM, signal.SIGABRT)


def _failures(log_tail: str) -> Iterator[_Failure]:
    known, is_first = dict[str, str](), False
    for line in log_tail.splitlines():
        if _ROOT_CAUSE in line:
            known, is_first = {}, True
        elif match := _OF_FAILURE.match(line):
            known[match[1]] = match[2]
            if match[1] == "exitcode":
                with suppress(ValueError):  # other output can look like a summary
                    seen = datetime.strptime(known.get("time", _LONG_AGO), _SEEN)
                    yield _Failure(known.get("host", ""), seen, int(match[2]), is_first)
                known, is_first = {}, False


def _first_failure(log_tail: str) -> _Failure | None:
    """Return the process that failed first: on other nodes, processes end as a consequence.

    Usually it is the first to end. But a busy node can end after those whose connections to it broke, and torchrun can
    take a process for the first whose connection broke: it knows exceptions by the second, and other ends when it sees
    them. So a process that a signal killed comes first, unless another process has a different exception, or unless it
    ended much later: torchrun kills those that don't end by themselves.
    """
    first: list[_Failure] = []
    killed: list[_Failure] = []
    others: list[_Failure] = []
    for failure in _failures(log_tail):
        others.append(failure)
        if failure.is_first:
            first.append(failure)
            killed += [each for each in others if each.was_killed and each.seen - failure.seen < _KILL_AFTER]
            others = []
    if all(map(_SECONDARY.search, exception_lines(log_tail))):
        first = killed + first
    return first[0] if first else None


def has_killed_process(log_tail: str) -> bool:
    """Return whether a signal from outside ended the process that failed first."""
    first = _first_failure(log_tail)
    return first is not None and first.was_killed


def names_no_cause(log_tail: str) -> bool:
    """Return whether a log has only what processes see when a process of another node fails."""
    return not has_killed_process(log_tail) and all(map(_SECONDARY.search, exception_lines(log_tail)))


def weight_of(log_tail: str) -> int:
    """Return how surely a node's log shows that the failure began there: 2, 1 if maybe, 0 if not at all."""
    if names_no_cause(log_tail):
        return 0
    if has_killed_process(log_tail):
        return 2
    lines = [line for line in exception_lines(log_tail) if not _SECONDARY.search(line)]
    return 1 if all(_cause_of_line(line) in _MAYBE_SECONDARY for line in lines) else 2


def cause_of_log(log_tail: str) -> Cause | None:
    """Return the cause that a log's exceptions name; None: they name none."""
    exceptions = exception_lines(log_tail)
    return next((cause for cause, pattern in _CAUSE_OF_EXCEPTION if any(map(pattern.search, exceptions))), None)


def _cause_of_line(line: str) -> Cause | None:
    return next((cause for cause, pattern in _CAUSE_OF_EXCEPTION if pattern.search(line)), None)


def failed_host(log_tail: str) -> str:
    """Return the host of the process that failed first, according to torchrun; empty: unknown."""
    first = _first_failure(log_tail)
    return first.host if first else ""


def exception_lines(log_tail: str) -> list[str]:
    """Return the lines that name an exception; consequences of another failure only if there are no others."""
    named, is_text_of_nccl = list[str](), False
    for line in (_RANK_PREFIX.sub("", line).strip() for line in log_tail.splitlines()):
        is_logged = _LOGGED_ERROR.match(line) and (_cause_of_line(line) or _SECONDARY.search(line))
        if is_text_of_nccl:
            named = [each for each in named if not _OF_NCCL.match(each)]
        if line and (_EXCEPTION.match(line) or is_text_of_nccl or is_logged):
            named.append(line)
        is_text_of_nccl = line == _LAST_ERROR
    return [line for line in named if not _SECONDARY.search(line)] or named


def last_exception(log_tail: str) -> str:
    """Return the last line that names an exception, or else the last line, marked as such: it need not be the cause."""
    lines = [stripped for line in log_tail.splitlines() if (stripped := _RANK_PREFIX.sub("", line).strip())]
    reasons = [line for line in lines if not _SRUN_SUMMARY.match(line)]
    if exceptions := exception_lines(log_tail):
        return exceptions[-1][:500]
    last = (reasons or lines)[-1:]
    return f"its last output: {last[0][:500]}" if last else "no output"


#: A thread in the stacks of a process (Python's faulthandler), and a frame of it, the innermost first.
_THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "([^"]+)", line \d+ in (.+)$', re.MULTILINE)
#: Places where a process waits for others: PyTorch's collectives, and the code that uses them.
_WAITS_FOR_OTHERS = re.compile(r"/torch/distributed/|/trainer/(parallel|backends)/")


def hung_ranks(stacks: Mapping[int, str], world_size: int) -> list[int]:
    """Return the ranks for which the others of a hanging job waited; empty: the stacks don't show that.

    These are ranks without stacks, since a stopped process writes none, or else those whose main thread is neither in a
    collective nor where most ranks are. They must be fewer than those that waited, or as many.

    Args:
        stacks: what each rank wrote when it was asked for its stacks.
    """
    places = {rank: _place(text) for rank, text in stacks.items() if rank < world_size}
    if silent := [rank for rank in range(world_size) if rank not in places]:
        return silent if len(silent) <= len(places) else []
    (usual, count), *_ = Counter(places.values()).most_common(1) or [(("", ""), 0)]
    most = usual if 2 * count > world_size else None
    others = [rank for rank, place in places.items() if place != most and not _WAITS_FOR_OTHERS.search(place[0])]
    if not others and most and count < world_size:  # in a collective, but in another one than most
        others = [rank for rank, place in places.items() if place != most]
    return sorted(others) if 2 * len(others) <= world_size else []


def _place(stacks: str) -> tuple[str, str]:
    """Return file and function of the innermost frame of the main thread, which comes last."""
    *_, main = _THREAD.split(stacks)
    frame = _FRAME.search(main)
    return (frame[1], frame[2]) if frame else ("", "")
