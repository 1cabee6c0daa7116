"""Measures the speed of this machine's processor for a plan, with as many simultaneous processes as the run has.

``python -m hlatctl.machine_speed ROWS INNER COLUMNS`` is one of these processes. It prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

#: Time for each of the three measurements.
_WINDOW_S = 0.25
_TIMEOUT_S = 30.0
#: An array larger than a laptop's caches, copied in slices: a short piece of work is rarely interrupted.
_ARRAY_BYTES = 64 << 20
_SLICE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speeds of one process while the others ran the same work.

    Args:
        shape: rows, inner dimension and columns of the product.
        fp32_flops_per_s: speed of FP32 matrix products of this shape.
        memory_bytes_per_s: bytes read and written while copying an array.
        link_bytes_per_s: bytes sent over a loopback connection.
        processes: number of processes measured simultaneously.
        threads: threads per process.
    """

    shape: tuple[int, int, int]
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    processes: int
    threads: int


def measure(shape: tuple[int, int, int], processes: int, threads: int) -> Speed | None:
    """Return the speed of the slowest of several processes; None without NumPy, or if it can't be measured."""
    argv = [sys.executable, "-P", "-m", "hlatctl.machine_speed", *map(str, shape)]
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with ExitStack() as running:
        start = partial(Popen, argv, env={**os.environ, **limits}, stdout=PIPE, stderr=DEVNULL)
        started = [running.enter_context(start()) for _ in range(processes)]
        for process in started:
            running.callback(process.kill)
        try:
            found = [json.loads(process.communicate(timeout=_TIMEOUT_S)[0]) for process in started]
        except (TimeoutExpired, ValueError):
            return None
    slowest = {key: min(one[key] for one in found) for key in found[0]}
    return Speed(shape=shape, processes=processes, threads=threads, **slowest)


def _measured(rows: int, inner: int, columns: int) -> dict[str, float]:
    import numpy as np

    left, right = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
    product = np.empty((rows, columns), np.float32)
    source = np.ones((_ARRAY_BYTES // _SLICE_BYTES, _SLICE_BYTES // 4), np.float32)
    target = np.ones_like(source)
    slices = itertools.cycle(zip(target, source, strict=True))
    return {
        "fp32_flops_per_s": 2 * rows * inner * columns / _fastest_s(lambda: np.matmul(left, right, out=product)),
        "memory_bytes_per_s": 2 * _SLICE_BYTES / _fastest_s(lambda: np.copyto(*next(slices))),
        "link_bytes_per_s": _SLICE_BYTES / _fastest_s(_send),
    }


def _fastest_s(work: Callable[[], object]) -> float:
    """Return the shortest time of some work, as ``timeit`` advises: other programs only ever make it longer."""
    work()
    begin, times_s = time.perf_counter(), list[float]()
    while not times_s or time.perf_counter() - begin < _WINDOW_S:
        before = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - before)
    return min(times_s)


def _send() -> None:
    """Send bytes over a loopback connection, as the collectives of CPUs do."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        thread = threading.Thread(target=sender.sendall, args=(bytes(_SLICE_BYTES),))
        thread.start()
        left, buffer = _SLICE_BYTES, bytearray(1 << 20)
        while left:
            left -= receiver.recv_into(buffer)
        thread.join()


if __name__ == "__main__":
    print(json.dumps(_measured(*map(int, sys.argv[1:4]))))
