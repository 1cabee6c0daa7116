"""``python -m trainer.launch PROCESSES [--import MODULE[:FUNCTION]]… -m MODULE …``: start the ranks of one machine.

Takes torchrun's place where processes may be forked (``conf.devices``): on CPUs, for which PyTorch has no driver or
context that a fork would break.
Importing PyTorch takes more than a second of a core. torchrun does it, and each of its processes again. This program
imports the modules once, calls the functions, and then forks the processes.

It sets torchrun's environment variables, and ends as torchrun does: if a process fails, the others are asked to end,
and a summary in torchrun's format names the first one. The exit code is then 1.

If the node's program stays (``hlatctl.node --stay``), this one stays too, and forks the processes of the next job, with
that one's arguments and variables: nothing is imported again. It has no threads, has opened no device, and has computed
nothing, so each fork is like the first. A preflight leaves its imports to training, a failed attempt to the next one.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hlatctl.run import processes, rank_output, startup
from hlatctl.run.following import FORKED, FORKS_ENV, MESSAGE_BYTES, Following

#: Time for processes to end by themselves after one has failed, before they are asked to. Often all fail together.
_TOGETHER_S = 1.0
#: Time to end after that, as under torchrun.
_END_S = 30.0
_POLL_S = 0.05
#: The word before this program's arguments in a command.
_OWN_NAME = "trainer.launch"
#: What all processes of a module import late, because other jobs don't need it. pyarrow is left to them: it starts a
#: thread.
_OF_TRAINING = (
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "conf.of_run",
    "trainer.checkpoint.manager",
    "trainer.gpu_node",
    "trainer.step.corruption",
    "trainer.step.profiling",
)
_IMPORTED_LATE = {"trainer": _OF_TRAINING, "trainer.preflight": _OF_TRAINING}


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


def _environment(rank: int, count: int, round_number: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process, without those of its network store."""
    number, size = str(rank), str(count)
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), number)
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
    return {**own, **sizes, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": str(round_number)}


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


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_OWN_NAME, description=__doc__)
    parser.add_argument("processes", type=int)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, required=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Start the processes and return the exit code. In each of them, run its module and return at its end."""
    arguments = _parse(argv)
    # OpenBLAS starts threads when numpy is imported. A process that forks should have none.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    forks = os.environ.pop(FORKS_ENV, None)
    node = socket.socket(fileno=int(forks)) if forks else None
    for name in ("torch", *arguments.modules, *_IMPORTED_LATE.get(arguments.module[0], ())):
        source, _, function = name.partition(":")
        with suppress(Exception):  # the processes meet the error again, and report it
            imported = importlib.import_module(source)
            if function:
                getattr(imported, function)()
    startup.imported()
    startup.begin()
    for round_number in itertools.count():
        os.environ["TORCHELASTIC_RUN_ID"] = uuid.uuid4().hex
        ranks: dict[int, int] = {}
        for rank in range(arguments.processes):
            pid = os.fork()
            if not pid:
                if node:
                    node.close()
                return _run(rank, arguments, round_number)
            ranks[pid] = rank
        if node and round_number:
            node.send(FORKED)
        code = _supervise(ranks)
        if not node or not (following := _following(node, code)):
            return code
        arguments = following
    return 0


def _run(rank: int, arguments: argparse.Namespace, round_number: int) -> int:
    """Run the module of a process that was just forked."""
    os.setsid()  # as under torchrun: signals to the job's process group don't reach it
    processes.call_rank(rank)
    os.environ.update(_environment(rank, arguments.processes, round_number))
    module, *sys.argv[1:] = arguments.module
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _following(node: socket.socket, code: int) -> argparse.Namespace | None:
    """Tell the node's program how the job ended, and return the arguments of the next one; None: there is none."""
    try:
        node.send(str(code).encode())
        told = node.recv(MESSAGE_BYTES)
    except OSError:
        return None
    if not told:
        return None
    following = Following(**json.loads(told))
    os.environ.update(following.env)
    rank_output.append_to(Path(following.log))
    return _parse(following.command[following.command.index(_OWN_NAME) + 1 :])


if __name__ == "__main__":
    startup.begin()
    sys.exit(main(sys.argv[1:]))
