"""Work with storage that all ranks do simultaneously, and whose errors reach all of them.

No collective waits for storage: while a rank works, all ranks exchange their states every few seconds. So the timeout
of a collective doesn't depend on the size of a checkpoint. Rank 0 gives up on storage that doesn't answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hlatctl.run.errors import HlatctlError, StorageError, code_of, from_record, hint_of, to_record
from trainer.backends.base import Member

#: Longest pause between two exchanges, s. The end of the slowest rank's work is noticed immediately.
_BEAT_S = 5.0

#: An error that is passed to another thread or rank, as ``hlatctl.run.errors.to_record`` writes it.
Failure = dict[str, str]


def on_rank0(backend: Member, work: Callable[[], Any], place: object) -> Any:
    """Call short work on rank 0; return its JSON value, or raise its error, on every rank, in the training thread.

    ``place`` is the folder named in errors that name none.
    """
    value, failure = None, None
    if backend.rank == 0:
        try:
            value = work()
        except (HlatctlError, OSError) as error:
            failure = _failure_of(error, backend, place)
    value, failure = backend.from_rank0([value, failure])
    if failure:
        raise from_record(failure)
    return value


def _failure_of(error: Exception, backend: Member, place: object) -> Failure:
    if not isinstance(error, HlatctlError):
        text = f"{place}: rank {backend.rank}: {type(error).__name__}: {error}"
        error = StorageError(text, hint=hint_of(error), code=code_of(error))
    return to_record(error)


class Together:
    """Runs work on all ranks, or on one for all. All ranks call each method together, from one thread at a time.

    Args:
        backend: its process group for threads other than the training thread is used.
        place: the folder named in errors that name none.
        limit_s: returns how long work may take; only rank 0's counts. It is called once for each piece of work.
    """

    def __init__(self, backend: Member, place: object, limit_s: Callable[[], float]) -> None:
        self._backend, self._place, self._limit_s = backend, place, limit_s

    def everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """Call ``work`` on every rank; return the JSON values of all, on all.

        Raises:
            HlatctlError: on every rank: the first failed rank's error, or rank 0's error that storage doesn't answer.
        """
        task = _Task(work, self.failure_of)
        is_first = self._backend.rank == 0
        deadline_s = time.monotonic() + self._limit_s() if is_first else 0.0
        done: list[bool] = []
        while not done or not all(done):
            task.join(_BEAT_S)
            late = is_first and time.monotonic() > deadline_s
            states = self._backend.gather_beside([task.done, task.failure, late])
            done = [state[0] for state in states]
            failure = next((state[1] for state in states if state[1]), None)
            if failure and (all(done) or states[0][2]):
                raise from_record(failure)
            if states[0][2] and not all(done):
                raise self._no_answer(done.index(False))
        return self._backend.gather_beside(task.value)

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` on rank 0; return its JSON value, or raise its error, on every rank."""
        kept: list[Any] = []
        self.everywhere(lambda: kept.append(work()) if self._backend.rank == 0 else None)
        return self._backend.from_rank0_beside(kept[0] if kept else None)

    def failure_of(self, error: Exception) -> Failure:
        """Return an error in the form that is sent to other ranks."""
        return _failure_of(error, self._backend, self._place)

    def _no_answer(self, rank: int) -> StorageError:
        return StorageError(
            f"{self._place}: rank {rank} has not finished reading or writing its part of a checkpoint in time",
            hint="check the storage that this folder is on",
        )


class _Task:
    """Work that runs in a thread, so that the caller can exchange messages meanwhile."""

    def __init__(self, work: Callable[[], Any], failure_of: Callable[[Exception], Failure]) -> None:
        self.value: Any = None
        self.failure: Failure | None = None
        self.done = False
        self._work, self._failure_of = work, failure_of
        # A daemon thread, so that a process can exit while its storage doesn't answer.
        self._thread = threading.Thread(target=self._run, name="checkpoint-storage", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.value = self._work()
        except Exception as error:  # any error must reach all ranks
            self.failure = self._failure_of(error)
        self.done = True
