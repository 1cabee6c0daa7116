"""The processes that compute for an evaluation: ``eval.replicas`` copies of a model.

Each copy has ``eval.tensor_parallel_size`` processes. A job is one line of JSON to all of them, and its result is one
line back (the module ``worker``). Copies take jobs as they become free; results come in the order of the jobs. If a
process ends, the evaluation fails with an error that names it, and the next try continues from the stored answers and
tasks. If a batch is too large for a process of a shared copy, the others wait for it in a sum, so the copy is started
again.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.devices import DEVICES
from eval.serving import memory
from hlatctl.run import processes
from hlatctl.run.errors import EvaluationError, HlatctlError, from_record

_END_TIMEOUT_S = 5.0
#: Thread counts of libraries that compute on a CPU; a number that the user has set is kept.
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every process needs to load the model.

    Args:
        processes: number of processes in the pool; on a CPU they share its memory.
        most_bytes: maximum memory of an ``auto`` batch; None: the free memory.
    """

    folder: str
    max_length: int
    device: str
    dtype: str
    batch_size: int | str
    processes: int
    share_prefixes: bool = False
    most_bytes: float | None = None


class Pool:
    """Copies of a model that compute.

    Args:
        scratch: a private folder; the processes of a copy find each other there.
    """

    def __init__(self, settings: Settings, *, replicas: int, tensor_parallel_size: int, scratch: Path) -> None:
        self.replicas = replicas
        self._copies: list[_Copy] = []
        self._threads = ThreadPoolExecutor(replicas, "replica")
        self._free: queue.SimpleQueue[_Copy] = queue.SimpleQueue()
        try:
            for number in range(replicas):
                self._copies.append(_Copy(number, tensor_parallel_size, settings, scratch))
            list(self._threads.map(lambda copy: copy.load(), self._copies))  # all load at the same time
            for copy in self._copies:
                self._free.put(copy)
        except BaseException:
            self.close()
            raise

    def map(self, kind: str, jobs: Iterable[dict[str, Any]]) -> Iterator[Any]:
        """Yield the result of each job, in order.

        Args:
            kind: a method of ``eval.serving.worker``.

        Raises:
            EvaluationError: a process has ended or refused a job; the pool is closed then.
        """
        results = [self._threads.submit(self._do, {"do": kind, **job}) for job in jobs]
        try:
            for result in results:
                yield result.result()
        except BaseException:
            self.close()
            raise

    def ask(self, kind: str, **job: Any) -> Any:
        """Return the result of one job."""
        (result,) = self.map(kind, [job])
        return result

    def close(self) -> None:
        """End all processes; jobs that have not begun are dropped."""
        for copy in self._copies:
            copy.close()
        self._threads.shutdown(cancel_futures=True)

    def _do(self, job: dict[str, Any]) -> Any:
        copy = self._free.get()
        try:
            return copy.ask(job)
        finally:
            self._free.put(copy)


class _Copy:
    """One copy of the model: processes that do the same jobs at the same time."""

    def __init__(self, number: int, size: int, settings: Settings, scratch: Path) -> None:
        self._number, self._size, self._settings, self._scratch = number, size, settings, scratch
        self._lock, self._is_closed, self._starts = threading.Lock(), False, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start()

    def load(self) -> None:
        self._ask(asdict(self._settings))

    def ask(self, job: dict[str, Any]) -> Any:
        """Return the result of a job; while memory is exhausted, restart the copy with less memory for a batch."""
        while True:
            try:
                return self._ask(job)
            except memory.Exhausted as exhausted:
                message = f"replica {self._number}: memory is exhausted; started again with smaller batches"
                print(message, file=sys.stderr, flush=True)
                self._settings = replace(self._settings, most_bytes=exhausted.most_bytes)
                self._start()
                self.load()

    def _start(self) -> None:
        """Start the processes, replacing earlier ones; never after :meth:`close`."""
        with self._lock:
            if self._is_closed:
                raise EvaluationError(f"replica {self._number}: ended with the evaluation")
            self._end()
            self._starts += 1
            store = self._scratch / f"replica-{self._number}-{self._starts}"
            first, size = self._number * self._size, self._size
            self._processes = [_start(first + rank, rank, size, self._settings, store) for rank in range(size)]

    def _ask(self, job: dict[str, Any]) -> Any:
        line = json.dumps(job).encode() + b"\n"
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended, as its output shows too
                processes.pipe_in(process).write(line)
                processes.pipe_in(process).flush()
        waiting = {processes.pipe_out(process).fileno(): process for process in self._processes}
        results = {}
        while waiting:
            for descriptor in select.select(list(waiting), [], [])[0]:
                process = waiting.pop(descriptor)
                results[process.pid] = self._result(process)
        return results[self._processes[0].pid]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            processes.wait_and_close(process)

    def _result(self, process: subprocess.Popen[bytes]) -> Any:
        line = processes.pipe_out(process).readline()
        if not line.endswith(b"\n"):
            raise self._lost(process)
        answer = json.loads(line)
        if "exhausted" in answer:
            raise memory.Exhausted(answer["exhausted"])
        if "error" in answer:
            raise from_record(answer["error"])
        return answer["done"]

    def _lost(self, process: subprocess.Popen[bytes]) -> HlatctlError:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
        code = process.returncode
        fewer = "a small eval.batch_size" if self._settings.batch_size == "auto" else "eval.batch_size=auto"
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return EvaluationError(
            f"replica {self._number}: process {process.pid} has ended ({how})",
            hint=f"the same command continues; if memory ran out, set {fewer} or fewer eval.replicas",
        )


def _start(index: int, rank: int, size: int, settings: Settings, store: Path) -> subprocess.Popen[bytes]:
    """Start a process; ``index`` is the index of its device."""
    environment = {
        **processes.child_environment(),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not DEVICES[settings.device].own_for_each_process:
        environment.setdefault(_THREADS, str(max(1, (os.cpu_count() or 1) // settings.processes)))
    command = [sys.executable, "-P", "-m", "eval.serving.worker", "--store", str(store)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
