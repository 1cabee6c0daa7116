"""``python -m trainer.launch PROCESSES [--import MODULE[:FUNCTION]]… -m MODULE …``: start the ranks of one node.

Takes torchrun's place where processes may be forked (``conf.devices``): on CPUs, for which PyTorch has no driver or
context that a fork would break. The ranks of several nodes meet at the first node's first rank, which has the store.
Importing PyTorch takes more than a second of a core. torchrun does it, and each of its processes again. This program
imports the modules once, calls the functions, and then forks the processes.

It sets torchrun's environment variables, and ends as torchrun does: if a process fails, the others are asked to end,
and a summary in torchrun's format names the first one. The exit code is then 1.

If the node's program stays (``hlatctl.node --stay``), this one stays too, and forks the processes of the next job, with
that one's arguments and variables: nothing is imported again. It has no threads, has opened no device, and has computed
nothing, so each fork is like the first. A preflight leaves its imports to training, a failed attempt to the next one.

On a node of an allocation it may wait for jobs from the start (``hlatctl.warm``). Each job is a child of its own, which
forks the ranks: the kernel kills the ranks with that child, and the child with this program or the job's node program.
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
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hlatctl import warm
from hlatctl.run import processes, rank_output, startup
from hlatctl.run.files import DAMAGED
from hlatctl.run.following import FORKED, FORKS_ENV, MESSAGE_BYTES, Following

#: Time for processes to end by themselves after one has failed, before they are asked to. Often all fail together.
_TOGETHER_S = 1.0
#: Time to end after that, as under torchrun.
_END_S = 30.0
_POLL_S = 0.05
#: Signals that ask a job to stop (``hlatctl.node``).
_STOPS = (signal.SIGTERM, signal.SIGINT)
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
            f"  rank      : {_first_rank() + self.rank} (local_rank: {self.rank})\n"
            f"  exitcode  : {self.exit_code} (pid: {self.pid})"
        )


def _first_rank() -> int:
    """Return the job's rank of this node's first process; each node has as many."""
    return int(os.environ.get("PET_NODE_RANK", "0")) * int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def _environment(local: int, count: int, round_number: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process, without those of a store that torchrun has."""
    nodes, node = int(os.environ.get("PET_NNODES", "1")), int(os.environ.get("PET_NODE_RANK", "0"))
    ranks = dict.fromkeys(("RANK", "ROLE_RANK"), str(node * count + local))
    sizes = dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(nodes * count))
    own = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RESTART_COUNT": str(round_number)}
    store = {name: os.environ[f"PET_{name}"] for name in ("MASTER_ADDR", "MASTER_PORT") if nodes > 1}
    return {**ranks, **sizes, **own, **store, "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes)}


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
    if node and node.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return _wait_for_jobs(node)
    for round_number in itertools.count():
        ranks = _fork(arguments, round_number, node)
        if ranks is None:
            return 0
        if node and round_number:
            node.send(FORKED)
        code = _supervise(ranks)
        if not node or not (following := _following(node, code)):
            return code
        arguments = following
    return 0


def _fork(arguments: argparse.Namespace, round_number: int, *inherited: socket.socket | None) -> dict[int, int] | None:
    """Fork a job's processes and return their ranks by id; None, at its end, in each of them."""
    os.environ["TORCHELASTIC_RUN_ID"] = uuid.uuid4().hex
    os.environ["LOCAL_WORLD_SIZE"] = str(arguments.processes)
    ranks: dict[int, int] = {}
    launcher = os.getpid()
    for rank in range(arguments.processes):
        pid = os.fork()
        if not pid:
            processes.end_with_parent(launcher)
            for connection in filter(None, inherited):
                connection.close()
            _run(rank, arguments, round_number)
            return None
        ranks[pid] = rank
    return ranks


def _wait_for_jobs(listener: socket.socket) -> int:
    """Run jobs that node programs hand over, one at a time, each in a child; SIGTERM ends this program between jobs."""
    while True:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        connection, _ = listener.accept()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # it asks the ranks to stop, who unblock it
        parent = os.getpid()
        if warm.of_same_user(connection) is not None:
            pid = os.fork()
            if not pid:
                listener.close()
                processes.end_with_parent(parent)
                return _one_job(connection)
            os.waitpid(pid, 0)
            if not processes.end_job(os.environ[processes.JOB_ENV]):
                return 1  # a process hangs in a device driver: nothing of it may meet the next job
        connection.close()


def _one_job(connection: socket.socket) -> int:
    """Run the job that a node program hands over, and tell it the exit code."""
    token = os.environ[processes.JOB_ENV]
    try:
        command, env = warm.take(connection)
        warm.end_with(connection)
        os.environ.clear()
        os.environ.update({**env, processes.JOB_ENV: token})
        tempfile.tempdir = None
        ranks = _fork(_arguments_of(command), int(warm.NEW_ENV not in env), connection)
        if ranks is None:
            return 0
        connection.send(FORKED)
        code = _supervise(ranks)
        connection.send(str(code).encode())
    except (OSError, *DAMAGED):
        return 1  # the node program has gone
    return code


def _run(local: int, arguments: argparse.Namespace, round_number: int) -> None:
    """Run the module of a process that was just forked."""
    os.setsid()  # as under torchrun: signals to the job's process group don't reach it
    own = _environment(local, arguments.processes, round_number)
    processes.call_rank(int(own["RANK"]))
    os.environ.update(own)
    module, *sys.argv[1:] = arguments.module
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__", alter_sys=True)


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
    return _arguments_of(following.command)


def _arguments_of(command: list[str]) -> argparse.Namespace:
    return _parse(command[command.index(_OWN_NAME) + 1 :])


if __name__ == "__main__":
    startup.begin()
    sys.exit(main(sys.argv[1:]))
