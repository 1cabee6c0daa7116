"""Run tasks in several processes, and show their combined progress."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from hlatctl.run import startup
from hlatctl.run.processes import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")
_TICK_S, _SHOW_EVERY_S = 1.0, 10.0
#: The speed is that of the last minute.
_RECENT = 6
#: Waiting tasks per process: results come in order, so few are kept.
_AHEAD = 4
_MB = 1e6

#: Documents and bytes of input that this process and its siblings have finished.
_counts: Any = [0, 0]
#: Held while the counts change: they are shared with other processes, or belong to this process alone.
_lock: Any = nullcontext()
#: Called after each change of the counts, in a process that works alone.
_tick: Callable[[], None] | None = None


def count(*, documents: int = 0, input_bytes: int = 0) -> None:
    """Add to the progress that is shown. Call this about once per thousand documents."""
    with _lock:
        _counts[0] += documents
        _counts[1] += input_bytes
    if _tick is not None:
        _tick()


class Progress:
    """Shows documents/s, MB/s and the time left every 10 s: on stderr, and in a file for the flow if one is given.

    ``things`` is the name of what ``documents`` counts.
    """

    def __init__(self, what: str, total_bytes: int, file: Path | None, *, things: str = "documents") -> None:
        self._what, self._total, self._file, self._things = what, total_bytes, file, things
        _counts[:] = [0, 0]
        self._shown = deque([(time.monotonic(), 0, 0)], maxlen=_RECENT)

    def tick(self) -> None:
        """Show the progress if it is due."""
        now_s = time.monotonic()
        if now_s - self._shown[-1][0] < _SHOW_EVERY_S:
            return
        documents, done = int(_counts[0]), int(_counts[1])
        then_s, documents_then, done_then = self._shown[0]
        self._shown.append((now_s, documents, done))
        took_s = now_s - then_s
        speed = (done - done_then) / took_s
        left = f", {(self._total - done) / speed:,.0f} s left" if speed else ""
        line = (
            f"{self._what}: {documents:,} {self._things}, {done / _MB:,.0f} of {self._total / _MB:,.0f} MB, "
            f"{(documents - documents_then) / took_s:,.0f} {self._things}/s, {speed / _MB:,.1f} MB/s{left}"
        )
        print(line, file=sys.stderr, flush=True)
        if self._file is not None:
            self._file.write_text(line + "\n", encoding="utf-8")


def spread(
    work: Callable[[Task], Result], tasks: Sequence[Task], progress: Progress, *, processes: int | None = None
) -> Iterator[Result]:
    """Do tasks in several processes and yield their results in order; with one process, do them in this one.

    Args:
        work: a function of a module; its argument and result can be pickled.
        processes: number of processes; None: one per core.

    Raises:
        Exception: the first one that a task raised, after the running tasks have ended.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(tasks))
    if processes <= 1:
        yield from _alone(work, tasks, progress)
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", _counts[:])
    _use(shared)
    with ProcessPoolExecutor(processes, context, _begin, (shared,)) as pool:
        try:
            yield from _in_order(pool, work, tasks, progress, processes * _AHEAD)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _alone(work: Callable[[Task], Result], tasks: Sequence[Task], progress: Progress) -> Iterator[Result]:
    global _tick
    _tick = progress.tick
    try:
        yield from map(work, tasks)
    finally:
        _tick = None


def _in_order(pool: Any, work: Any, tasks: Sequence[Any], progress: Progress, ahead: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    for task in [*tasks, *[None] * ahead]:
        if task is not None:
            waiting.append(pool.submit(work, task))
        if waiting and (len(waiting) >= ahead or task is None):
            while not wait([waiting[0]], _TICK_S, FIRST_COMPLETED).done:
                progress.tick()
            yield waiting.popleft().result()


def _begin(counts: Any) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    end_with_parent(starter.pid)
    startup.begin()
    _use(counts)


def _use(counts: Any) -> None:
    global _counts, _lock
    _counts, _lock = counts, counts.get_lock()
