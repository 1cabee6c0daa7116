"""The packed sequences of one data-parallel rank, made in the background while the device computes.

The state is that of the batches taken, never of those made ahead, so a checkpoint resumes at the very next token.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hlatctl.run.errors import CheckpointError, DataError
from trainer.data import tokenizer
from trainer.data.documents import Documents
from trainer.data.packing import Deal, Position, Row, Tokens

_STOP_POLL_S = 0.1

#: Where each row of the global batch is: (epoch, document, token), as JSON.
State = list[list[int]]


@dataclass(frozen=True)
class _Batch:
    """Tokens (rows, seq_len + 1), and where the rows are after them."""

    tokens: Tokens
    after: list[Position]


class Loader:
    """Gives a rank's share of each step's sequences.

    Args:
        dataset: ``dataset.json``.
        global_batch_size: sequences per step over all ranks.
        seq_len: tokens.
        seed: of the documents' order.
        rank: data-parallel rank.
        size: data-parallel size.
        prefetch_batches: made ahead at most.
        state: of all ranks, in order: their :attr:`state` lists one after another, whatever number of ranks that was.

    Raises:
        DataError: the corpus can't be read, or is empty.
        CheckpointError: the state is not one of such a global batch.
    """

    def __init__(
        self, dataset: dict[str, Any], *, global_batch_size: int, seq_len: int, seed: int, rank: int, size: int,
        prefetch_batches: int, state: State | None = None,
    ) -> None:  # fmt: skip
        # One thread a rank: the cores belong to the computation.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        documents = Documents([Path(entry["path"]) for entry in dataset["files"]])
        if not len(documents):
            raise DataError("data.path: the prepared corpus has no training documents", hint="give a larger corpus")
        self._encoder = tokenizer.load(Path(dataset["tokenizer"]["path"]) / tokenizer.TOKENIZER_JSON)
        self._seq_len = seq_len
        positions = _positions(state, global_batch_size)
        deal = Deal(len(documents), rows=global_batch_size, seed=seed)
        mine = range(global_batch_size // size * rank, global_batch_size // size * (rank + 1))
        eos_id = int(dataset["tokenizer"]["eos_id"])
        rows = [Row(documents, deal, self._encode, eos_id=eos_id, row=i, start=positions[i]) for i in mine]
        self._taken = [row.position for row in rows]
        self._queue: queue.Queue[_Batch | BaseException] = queue.Queue(maxsize=prefetch_batches)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(rows,), name="loader", daemon=True)
        self._thread.start()
        self.wait_s = 0.0
        """Time that :meth:`next` has waited since this was last set to 0."""

    @property
    def state(self) -> State:
        """Where this rank's rows are after the last batch taken."""
        return [list(astuple(position)) for position in self._taken]

    def next(self) -> tuple[Tensor, Tensor]:
        """The rank's (inputs, targets) of the next step, each (sequences, seq_len) int64 on the CPU; may wait."""
        started = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        self._taken = item.after
        tokens = torch.from_numpy(item.tokens).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def close(self) -> None:
        """Stop the background thread."""
        self._stopping.set()
        self._thread.join()

    def _encode(self, text: str) -> Sequence[int]:
        (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _produce(self, rows: list[Row]) -> None:
        try:
            while not self._stopping.is_set():
                tokens = np.stack([row.take(self._seq_len) for row in rows])
                self._put(_Batch(tokens, [row.position for row in rows]))
        except BaseException as error:  # handed to the thread that waits for batches, which raises it
            self._put(error)

    def _put(self, item: _Batch | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                return self._queue.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue


def _positions(state: State | None, rows: int) -> list[Position]:
    if state is None:
        return [Position()] * rows
    try:
        positions = [Position(*(int(number) for number in entry)) for entry in state]
    except (TypeError, ValueError):
        raise CheckpointError(f"the data loader's state is not one: {str(state)[:200]}") from None
    if len(positions) != rows:
        raise CheckpointError(
            f"the checkpoint's global batch has {len(positions)} sequences, train.global_batch_size={rows}",
            hint=f"resume with train.global_batch_size={len(positions)}",
        )
    return positions
