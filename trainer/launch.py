"""``python -m trainer.launch PROCESSES [--import MODULE[:FUNCTION]]… -m MODULE …``: start the ranks of one machine.

Takes torchrun's place where processes may be forked (``conf.devices``): on CPUs, for which PyTorch has no driver or
context that a fork would break.
Importing PyTorch takes more than a second of a core. torchrun does it, and each of its processes again. This program
imports the modules once, calls the functions, and then forks the processes.

It sets torchrun's environment variables, and ends as torchrun does: if a process fails, the others are asked to end,
and a summary in torchrun's format names the first one. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import signal
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from hlatctl.run import processes, startup

#: Time for processes to end by themselves after one has failed, before they are asked to. Often all fail together.
_TOGETHER_S = 1.0
#: Time to end after that, as under torchrun.
_END_S = 30.0
_POLL_S = 0.05
#: What all processes of a module import late, because other jobs don't need it.
_IMPORTED_LATE = {"trainer": ("torch.distributed.tensor", "torch.distributed.checkpoint")}


@dataclass(frozen=True)
class _Failure:
    """A process that failed; a negative exit code is the number of a signal."""

    rank: int
    pid: int
    exit_code: int
    seen: datetime = field(default_factory=datetime.now)

    def __str__(self) -> str:
        return (
            f"[{self.rank}]:\n"
            f"  time      : {self.seen:%Y-%m-%d_%H:%M:%S}\n"
            f"  host      : {processes.node_name()}\n"
            f"  rank      : {self.rank} (local_rank: {self.rank})\n"
            f"  exitcode  : {self.exit_code} (pid: {self.pid})"
        )


def _environment(rank: int, count: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process, without those of its network store."""
    number, size = str(rank), str(count)
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), number)
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
    return {**own, **sizes, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}


def _wait(ranks: dict[int, int], timeout_s: float | None = None) -> list[_Failure]:
    """Wait until all processes have ended, or until the first failure, or for a time. Return the failures.

    Args:
        ranks: rank by process id; loses those that have ended.
        timeout_s: None: until the first failure.
    """
    failures: list[_Failure] = []
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while ranks and (deadline is None or time.monotonic() < deadline):
        pid, status = os.waitpid(-1, 0 if deadline is None else os.WNOHANG)
        if not pid:
            time.sleep(_POLL_S)
        elif pid in ranks:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code:
                failures.append(_Failure(rank, pid, code))
            if code and deadline is None:
                break
    return failures


def _supervise(ranks: dict[int, int]) -> int:
    """Wait for all processes and return the exit code."""
    failures = _wait(ranks)
    if not failures:
        return 0
    failures += _wait(ranks, _TOGETHER_S)
    for number, timeout_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        failures += _wait(ranks, timeout_s)
    first, *others = failures
    lines = ["Failures:", *map(str, others), "Root Cause (first observed failure):", str(first)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return 1


def main(argv: list[str]) -> int:
    """Start the processes and return the exit code. In each of them, run its module and return at its end."""
    parser = argparse.ArgumentParser(prog="trainer.launch", description=__doc__)
    parser.add_argument("processes", type=int)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, required=True)
    arguments = parser.parse_args(argv)
    count, (module, *rest) = arguments.processes, arguments.module
    # OpenBLAS starts threads when numpy is imported. A process that forks should have none.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["TORCHELASTIC_RUN_ID"] = uuid.uuid4().hex
    for name in ("torch", *arguments.modules, *_IMPORTED_LATE.get(module, ())):
        source, _, function = name.partition(":")
        with suppress(Exception):  # the processes meet the error again, and report it
            imported = importlib.import_module(source)
            if function:
                getattr(imported, function)()
    startup.imported()
    startup.begin()
    ranks: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if not pid:
            os.setsid()  # as under torchrun: signals to the job's process group don't reach it
            processes.call_rank(rank)
            os.environ.update(_environment(rank, count))
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        ranks[pid] = rank
    return _supervise(ranks)


if __name__ == "__main__":
    startup.begin()
    sys.exit(main(sys.argv[1:]))
