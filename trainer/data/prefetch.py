"""Batches that a background thread prepares while the device computes. ``trainer.data.loader`` does the work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.data.packing import Position, Span
from trainer.data.tokenizer import Tokens

#: How often a waiting thread checks whether to stop.
STOP_POLL_S = 0.1

#: For each row of the global batch: the number of batches drawn, then its position's numbers; JSON.
State = list[list[int]]


@dataclass(frozen=True)
class Batch:
    """Tokens (rows, seq_len + 1) and the batch's number; in the reading process also their spans and positions.

    Args:
        after: the rows' positions after the batch.
    """

    tokens: Tokens
    number: int
    spans: list[list[Span]] = field(default_factory=list)
    after: list[Position] = field(default_factory=list)


class Batches:
    """A process's share of each step's sequences.

    Args:
        batch: number of the last batch taken before.
        ahead: how many batches the thread may prepare.
    """

    def __init__(self, *, batch: int, ahead: int) -> None:
        self.batch = batch
        """Number of the last batch taken, 1-based, including skipped ones."""
        self.spans: list[list[Span]] = []
        """For each sequence of the last batch, its spans; only in the process that reads the documents."""
        self.wait_s = 0.0
        """Seconds that :meth:`next` has waited since this was last set to 0."""
        self._taken: list[Position] = []
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> State:
        """The positions of this process's rows after the last batch taken; empty if another process reads them."""
        return [[self.batch, *position.to_json()] for position in self._taken]

    def next(self) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the next step, each (sequences, seq_len) int64 on the CPU; may wait.

        Raises:
            HlatctlError: the corpus can't be read, here or in the process that reads it.
            ConnectionError: the process that reads it has ended.
        """
        started = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        self._taken, self.spans, self.batch = item.after, item.spans, item.number
        tokens = torch.from_numpy(item.tokens).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def close(self) -> None:
        """Stop the background thread."""
        self._stopping.set()
        with suppress(queue.Empty):  # make room, so that a waiting thread ends before its timeout
            self._queue.get_nowait()
        if self._thread:
            self._thread.join()

    def _start(self, produce: Callable[[], None]) -> None:
        """Call ``produce`` in the thread until it returns; :meth:`next` raises its error."""

        def work() -> None:
            try:
                produce()
            except BaseException as error:  # the thread that waits for batches raises it
                self._put(error)

        self._thread = threading.Thread(target=work, name="loader", daemon=True)
        self._thread.start()

    def _put(self, item: Batch | BaseException) -> None:
        """Wait for room in the queue, unless the thread has to stop."""
        while not self._stopping.is_set():
            try:
                return self._queue.put(item, timeout=STOP_POLL_S)
            except queue.Full:
                continue


class NoBatches(Batches):
    """The batches of a pipeline stage that needs no tokens: zeros of the right shape.

    Args:
        shape: (sequences, seq_len).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(batch=0, ahead=1)
        self._zeros = torch.zeros(shape, dtype=torch.int64)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the zeros twice."""
        return self._zeros, self._zeros
