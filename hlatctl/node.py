"""``python -m hlatctl.node BASE -- COMMAND``: runs a job's command on one node, under every launcher.

It writes its identity to BASE.pid and gives the command a private folder for temporary files. When the command ends, it
ends all remaining processes of the command, removes the folder, and writes BASE.exit_code last. On nodes other than the
first, the files are ``BASE.node-RANK.pid`` and so on.

SIGTERM and SIGINT ask the command to stop. If the command is torchrun, only its ranks are asked: torchrun would kill
ranks that need more than 30 s to save a checkpoint (pytorch/pytorch#119856), and report its own failure instead of
their exit code. Schedulers signal every process of a job, so torchrun starts with these signals blocked, and its ranks
unblock them (``trainer.process``). SIGQUIT ends all processes immediately. On Linux, the command ends with this
program.

A notice that the provider takes this node back asks the command to stop too (``hlatctl.notices``).

On one machine, the processes find each other through files in the private folder and communicate over loopback.
torchrun's own store would listen on all interfaces, and torchrun unpickles its content.

With ``--stay passed`` or ``--stay failed``, for a job on one machine whose ranks ``trainer.launch`` forks, both
programs wait for a minute after such an end, and run the next job if it is handed over (``hlatctl.run.following``). All
other processes of the job have ended by then, as always before BASE.exit_code is written.

On the nodes of an allocation, a process may wait that has imported everything (``hlatctl.warm``). ``hlatctl.node --warm
-- COMMAND`` starts it. Then this program hands the job over to it. The ranks are not below this program, but the kernel
ends them with it, and all else is as for a command of its own.

There it also holds a connection that shows that this node is not cut off (``hlatctl.cut_nodes``).

The output of torchrun's ranks goes into one log per node (``hlatctl.node_log``): on the first node to this program's
own output, on the others to a file next to the job's log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from hlatctl import cut_nodes, notices, warm
from hlatctl.cache.environment import stage
from hlatctl.node_log import NodeLog
from hlatctl.run import fence, files, processes, rank_output
from hlatctl.run.errors import HlatctlError
from hlatctl.run.files import DAMAGED
from hlatctl.run.following import FORKED, FORKS_ENV, MESSAGE_BYTES, Following, following_file, stays_after
from hlatctl.run.processes import node_name, node_python

#: Environment variables that a scheduler's script sets and this program passes on.
NODE_RANK_ENV = "NODE_RANK"
NODES_ENV = "HLATCTL_NODES"
MASTER_ADDR_ENV = "HLATCTL_MASTER_ADDR"
MASTER_PORT_ENV = "HLATCTL_MASTER_PORT"
INTERFACE_ENV = "HLATCTL_INTERFACE"
#: The job's log. Nodes other than the first write theirs next to it.
LOG_ENV = "HLATCTL_LOG"
#: The record of an environment that this node unpacks on its own disk, and runs the command in.
ENVIRONMENT_ENV = "HLATCTL_ENVIRONMENT"
#: Size of a record on the disk, padded with spaces: more than its fields need.
_RECORD_BYTES = 1024
#: Exit code of a shell for a command that it can't start (POSIX, "Exit Status for Commands").
_NOT_STARTED = 127
#: Interval between two reads of the file of orders, which may be on storage that all nodes share.
_ORDERS_EVERY_S = 1.0
#: Signals that ask a job to stop.
_STOPS = (signal.SIGTERM, signal.SIGINT)
#: Programs that start the ranks of a node.
_LAUNCHERS = {"torch.distributed.run", "trainer.launch"}
#: A node that can't start ends the whole job. The others first write their records, and then this one is known.
_OTHERS_START_S = 5.0
#: How long this program stays for the next job, and how often it looks for it.
_STAYS_S, _LOOK_S = 60.0, 0.02
#: Time to wait for a process that may still import, as a command of this program's own would have to.
_IMPORTS_S = 600.0
#: Time for ``trainer.launch`` to fork the ranks of the next job.
_FORKED_S = 5.0
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
#: Newer versions of torchrun read from the environment how long they wait for ranks after a signal.
_TORCHRUN_PATIENCE_S = 86400


def record(base: Path, kind: str, rank: int = 0) -> Path:
    """Return the path of a node's record: ``pid``, written at the start, or ``exit_code``, at the end; both JSON."""
    node = f".node-{rank}" if rank else ""
    return base.with_name(f"{base.name}{node}.{kind}")


def reserved(base: Path, kind: str, rank: int = 0) -> Path:
    """Return the path of a record before it is renamed. Its space is reserved, because the disk can be full at the end.

    Once the node is asked to stop, the reserved ``exit_code`` holds ``asked_to_stop``, for readers if the node is
    killed.
    """
    path = record(base, kind, rank)
    return path.with_name(f"{path.name}.tmp")


def orders(base: Path) -> Path:
    """Return the file of orders to the nodes of a job, for senders without signals: JSON, ``what`` and a new ``id``."""
    return base.with_name(f"{base.name}.orders")


def several_machines(nodes: int) -> dict[str, str]:
    """Return the variables with which torchrun and the ranks of several nodes meet, at a port of the first node.

    The rendezvous is static: ranks follow the order of the nodes, and nothing that the store holds is unpickled.
    """
    interface = os.environ.get(INTERFACE_ENV)
    return {
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": os.environ[NODE_RANK_ENV],
        "PET_RDZV_BACKEND": "static",
        "PET_MASTER_ADDR": os.environ[MASTER_ADDR_ENV],
        "PET_MASTER_PORT": os.environ[MASTER_PORT_ENV],
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_TORCHRUN_PATIENCE_S),
        **({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}),
    }


def one_machine(folder: Path) -> dict[str, str]:
    """Return the variables that keep the communication of processes within one machine.

    PET_* are torchrun's options. Its store is a file that grows with each heartbeat, so there is one heartbeat per day.
    The ranks create their own store (``trainer.rendezvous``).
    """
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_CONF": f"store_type=file,keep_alive_interval={24 * 3600}",
        "PET_RDZV_ENDPOINT": os.fspath(folder / "torchrun"),
        "PET_LOCAL_ADDR": "127.0.0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_TORCHRUN_PATIENCE_S),
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
    }


class Node:
    """Runs the command of a job on this node.

    Args:
        base: path prefix of the records.
        rank: this node's rank.
        stays: the end after which it runs further jobs if they are handed over: ``passed`` or ``failed``.
    """

    def __init__(self, base: Path, command: list[str], rank: int, *, stays: str = "") -> None:
        self._base, self._command, self._rank = base, command, rank
        self._stays, self._watches = stays, False
        self._forks: socket.socket | None = None  # to ``trainer.launch``, while it can stay
        self._token = uuid.uuid4().hex
        self._tokens = [self._token]
        self._child: processes.Identity | None = None
        self._warm: processes.Identity | None = None  # what has forked this job's ranks, and outlives it
        self._asked_to_stop = self._asked_to_end = self._over = False
        self._order = ""
        self._pid, self._parent = os.getpid(), os.getppid()
        self._starts_ranks = not _LAUNCHERS.isdisjoint(command)
        self._fence = fence.of_job(base)
        self._watch = notices.of_environment()
        self._link: cut_nodes.Link | None = None  # to the program that keeps this node

    def run(self) -> int:
        """Run the command and return its exit code: 128 + n if signal n ended it, 127 if it can't be started."""
        for number in _STOPS:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGQUIT, self._end)
        try:
            self._reserve()
            _use_own_log(self._rank)
        except OSError as error:
            return _no_records(error)
        with files.private_folder("job") as own:
            code = self._attempt(own, lambda: self._run_command(own))
            while self._forks and (following := self._await_following(following_file(own.path))):
                try:
                    log = self._take_over(following, own)
                except (OSError, *DAMAGED) as error:
                    print(f"{node_name()}: the next job can't be taken over ({error})", file=sys.stderr, flush=True)
                    break
                code = self._attempt(own, functools.partial(self._until_end, log))
            self._end_all()
        return code

    def _reserve(self) -> None:
        for kind in ("pid", "exit_code"):
            reserved(self._base, kind, self._rank).write_bytes(b" " * _RECORD_BYTES)

    def _attempt(self, own: files.Scratch, run: Callable[[], int]) -> int:
        """Run one attempt between its two records, and return its exit code."""
        self._over, before = False, processes.oom_kills()
        identity = asdict(processes.identify(os.getpid()) or _unknown())
        self._write("pid", {**identity, "token": self._token, "tmp_dir": os.fspath(own.path)})
        code = run()
        if self._forks is None:
            shutil.rmtree(own.path, ignore_errors=True)
        after = processes.oom_kills()
        killed = None if after is None else after - (before or 0)
        self._over = True
        value = {"code": code, "asked_to_stop": self._asked_to_stop, "oom_kills": killed}
        self._write("exit_code", {**value, "warm": self._warm is not None})
        if self._link:
            self._link.close()
        return code

    def _run_command(self, own: files.Scratch) -> int:
        nodes, log = int(os.environ.get(NODES_ENV, "1")), self._log(own.path)
        env = {
            **os.environ,
            **(several_machines(nodes) if nodes > 1 else one_machine(own.path)),
            processes.JOB_ENV: self._token,
            "TMPDIR": os.fspath(own.path),
            files.JOB_FOLDER_ENV: os.fspath(own.path),
            **({rank_output.SOCKET_ENV: os.fspath(log.socket)} if log else {}),
        }
        env.pop(cut_nodes.WATCH_ENV, None)  # the secret is not for the job
        if self._starts_ranks and (code := self._fork_from_warm(env)):
            return code
        if self._warm:
            return self._until_end(log)
        try:
            command, keep = _in_own_environment(self._command, env)
            if self._stays:
                self._forks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                env[FORKS_ENV], keep = str(theirs.fileno()), [*keep, theirs.fileno()]
            self._process = subprocess.Popen(
                command, env=env, process_group=0, pass_fds=[own.lock, *keep], preexec_fn=self._before_command
            )
        except OSError as error:
            self._forks = None
            print(f"{shlex.join(self._command)}: can't be started ({error.strerror})", file=sys.stderr)
            return _NOT_STARTED
        if self._stays:
            theirs.close()
        self._child = processes.identify(self._process.pid)
        return self._until_end(log)

    def _fork_from_warm(self, env: dict[str, str]) -> int:
        """Hand the job over to a process that waits on this node, if there is one (``self._warm``).

        Returns:
            0, or the exit code if the job was asked to end before its ranks were forked.
        """
        if (found := warm.connect()) is None:
            return 0
        self._forks, waits, token = found
        told, deadline_s = b"", time.monotonic() + (_IMPORTS_S if os.environ.get(warm.NEW_ENV) else _FORKED_S)
        try:
            warm.hand_over(self._forks, self._command, env)
            while not (self._asked_to_stop or self._asked_to_end) and time.monotonic() < deadline_s:
                if select.select([self._forks], [], [], _ORDERS_EVERY_S)[0]:
                    told = self._forks.recv(MESSAGE_BYTES)
                    break
                self._obey()
        except OSError as error:
            print(f"{node_name()}: starts anew, because the job can't be handed over ({error})", flush=True)
        if told == FORKED:
            self._child = self._warm = waits
            self._tokens.append(token)
            return 0
        self._forks.close()
        self._forks = None
        processes.end_job(token, and_also=[waits])  # it is damaged, or would still import when nobody waits for it
        return 128 + signal.SIGKILL if self._asked_to_stop or self._asked_to_end else 0

    def _until_end(self, log: NodeLog | None) -> int:
        """Watch the running attempt until its end, and end what is left of it."""
        if log:
            log.start()  # now: threads must not exist when a process is started with preexec_fn
        if self._watch and not self._watches:
            self._watch.start()
            self._watches = True
        self._link = cut_nodes.Link.of_environment(node_name())
        if self._asked_to_end:
            self._end_all()
        elif self._asked_to_stop:
            self._ask()
        while (code := self._ended()) is None:
            self._obey()
            self._heed()
            if NODES_ENV in os.environ and os.getppid() != self._parent:
                self._end_all()  # the scheduler's program here is gone: it could not end this job
        if not self._end_all(but=self._child if self._forks else None):
            # A process hangs in a device driver: nothing of it may meet the next attempt.
            self._forks = self._warm = None
            self._end_all()
        if log:
            log.close()
        return 128 - code if code < 0 else code

    def _await_following(self, path: Path) -> Following | None:
        """Wait for the file with the next job; None: there is none in time, or ``trainer.launch`` has ended."""
        deadline_s = time.monotonic() + _STAYS_S
        while self._forks and time.monotonic() < deadline_s and not (self._asked_to_stop or self._asked_to_end):
            if select.select([self._forks], [], [], _LOOK_S)[0]:
                return None
            try:
                return Following(**files.read_json(path))
            except FileNotFoundError:
                continue
            except (OSError, *DAMAGED):
                return None
        return None

    def _take_over(self, following: Following, own: files.Scratch) -> NodeLog | None:
        """Have ``trainer.launch`` fork the ranks of the next job; return the collector of their output.

        Raises an OSError or one of ``DAMAGED`` if it doesn't.
        """
        assert self._forks is not None
        self._base, self._command, self._order = Path(following.base), following.command, ""
        self._stays = following.stays
        self._fence = fence.of_job(self._base)
        os.environ.update(following.env)
        self._reserve()
        rank_output.append_to(Path(following.log))
        for left in own.path.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        log = self._log(own.path)
        self._forks.send(json.dumps(asdict(following)).encode())
        if not select.select([self._forks], [], [], _FORKED_S)[0] or self._forks.recv(MESSAGE_BYTES) != FORKED:
            raise OSError("no ranks were forked")
        return log

    def _log(self, folder: Path) -> NodeLog | None:
        """Return the collector of the ranks' output; None: output goes to this program's own output."""
        try:
            return NodeLog(folder, sys.stdout.fileno()) if self._starts_ranks else None
        except OSError:
            return None  # the path of a socket is limited

    def _before_command(self) -> None:
        """Prepare the new process. Runs between fork and exec, which is safe because this program has no threads."""
        processes.end_with_parent(self._pid)
        processes.raise_open_files()
        if self._starts_ranks:
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)

    def _ended(self) -> int | None:
        if self._forks:
            if not select.select([self._forks], [], [], _ORDERS_EVERY_S)[0]:
                return None
            told = self._forks.recv(MESSAGE_BYTES)
            if self._warm:
                self._forks.close()
                self._forks = None
                return int(told) if told else -signal.SIGKILL
            if told and stays_after(self._stays, int(told)) and not self._asked_to_stop and not self._asked_to_end:
                return int(told)
            self._forks.close()  # then it ends, if it hasn't
            self._forks = None
        try:
            return self._process.wait(_ORDERS_EVERY_S)
        except subprocess.TimeoutExpired:
            return None

    def _obey(self) -> None:
        if self._fence and self._fence.is_closed():
            print(f"{node_name()}: attempt {self._fence.attempt} is over, ending its processes", file=sys.stderr)
            self._end(signal.SIGQUIT, None)
        if self._link and self._link.ordered_end():
            print(f"{node_name()}: another node is cut off, ending this job's processes", file=sys.stderr, flush=True)
            self._end(signal.SIGQUIT, None)
        try:
            order = json.loads(orders(self._base).read_bytes())
            what, number = str(order["what"]), str(order["id"])
        except (OSError, ValueError, TypeError, KeyError):
            return
        if number == self._order:
            return
        self._order = number
        if what == "stop":
            self._stop(signal.SIGTERM, None)
        elif what == "end":
            self._end(signal.SIGQUIT, None)
        elif what == "stacks" and self._child:
            own = [self._child.pid, *processes.descendants(self._child.pid)]
            print(processes.ask_for_stacks(own), file=sys.stderr, flush=True)

    def _heed(self) -> None:
        for notice in self._watch.new() if self._watch else ():
            print(notice.message, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):  # the driver doesn't learn of it; the checkpoint matters more
                notices.append(self._base, notice)
            if notice.ends_unix_s is not None:
                self._stop(signal.SIGTERM, None)

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked_to_stop = True
        self._ask()
        if not self._over:  # the record of the end is not being written
            with contextlib.suppress(OSError):
                self._fill("exit_code", {"asked_to_stop": True})

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked_to_end = True
        self._end_all()

    def _ask(self) -> None:
        if self._child is None:
            return
        ranks = list(processes.ranks(self._child.pid).values())
        if self._starts_ranks and not ranks:
            self._end_all()  # there is nothing to save
            return
        for process in ranks or [self._child]:
            processes.send(process, signal.SIGTERM)

    def _end_all(self, but: processes.Identity | None = None) -> bool:
        """End all processes of the job but one, and what waits for jobs; return whether none is left."""
        spared = [process for process in (but, self._warm) if process]
        return processes.end_job(*self._tokens, and_also=[self._child] if self._child else (), but=spared)

    def _write(self, kind: str, value: dict[str, Any]) -> None:
        self._fill(kind, value).replace(record(self._base, kind, self._rank))

    def _fill(self, kind: str, value: dict[str, Any]) -> Path:
        common, path = {"v": 1, "host": node_name(), "time_unix_s": time.time()}, reserved(self._base, kind, self._rank)
        with path.open("r+b") as file:
            file.write(json.dumps({**common, **value}).encode().ljust(_RECORD_BYTES - 1) + b"\n")
        return path


def _use_own_log(rank: int) -> None:
    """Redirect the output of a node other than the first to a separate log, which no other node waits for."""
    if rank and LOG_ENV in os.environ:
        rank_output.append_to(rank_output.node_log(Path(os.environ[LOG_ENV]), rank))


def _in_own_environment(command: list[str], env: dict[str, str]) -> tuple[list[str], list[int]]:
    """Return the command in the environment on this node's disk, and descriptors that protect it; changes ``env``.

    If the environment can't be unpacked, the command starts more slowly in the shared one.
    """
    record = os.environ.get(ENVIRONMENT_ENV)
    if not record:
        return command, []
    started_s = time.monotonic()
    try:
        known = files.read_sealed_json(Path(record))
        staged = stage(known, Path(known["folder"]))
    except (OSError, HlatctlError, *DAMAGED) as error:
        why = error.message if isinstance(error, HlatctlError) else str(error)
        print(f"warning: {node_name()} uses the shared environment, because its own is not ready: {why}", flush=True)
        return command, []
    print(f"{node_name()}: environment on {staged.folder} after {time.monotonic() - started_s:.1f} s", flush=True)
    env["PATH"] = os.pathsep.join([os.fspath(staged.prefix / "bin"), *filter(None, [env.get("PATH")])])
    env["VIRTUAL_ENV"] = os.fspath(staged.prefix)
    ours = (sys.executable, node_python())
    return [staged.python if word in ours else word for word in command], [staged.lock]


def _wait_for_jobs(command: list[str]) -> int:
    """Become a process that waits for jobs (``hlatctl.warm``); return only if it can't be started."""
    env = dict(os.environ)
    command, keep = _in_own_environment(command, env)
    try:
        warm.become(command, env, keep)
    except OSError as error:
        print(f"{node_name()}: no process waits for jobs here ({error})", file=sys.stderr, flush=True)
    return _NOT_STARTED


def _no_records(error: OSError) -> int:
    """Print why the job can't be started here, as a line that the driver finds in the job's log."""
    share = "; runs_dir must be on storage that all nodes share" if isinstance(error, FileNotFoundError) else ""
    line = f"StorageError: {error.filename}: can't be written on {node_name()} ({error.strerror}){share}"
    print(line, file=sys.stderr, flush=True)
    if int(os.environ.get(NODES_ENV, "1")) > 1:
        time.sleep(_OTHERS_START_S)
    return _NOT_STARTED


def _unknown() -> processes.Identity:
    """Return an identity that no process has, for systems without information about processes."""
    return processes.Identity(pid=0, started="", boot_id="")


def main(argv: list[str]) -> int:
    """Run a command and return its exit code."""
    if argv[:2] == ["--warm", "--"] and len(argv) > 2:
        return _wait_for_jobs(argv[2:])
    base, stays, command = argv[:1], "", argv[1:]
    if command[:1] == ["--stay"] and len(command) > 1:
        stays, command = command[1], command[2:]
    if not base or len(command) < 2 or command[0] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    return Node(Path(base[0]).absolute(), command[1:], int(os.environ.get(NODE_RANK_ENV, "0")), stays=stays).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
