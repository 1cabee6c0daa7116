"""The packed sequences of one data-parallel rank, prepared in the background while the device computes.

The state counts batches that were taken, never prefetched ones, so a checkpoint resumes at the next token.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.amend import skipped_batches
from conf.schema import Config
from hlatctl.run.errors import CheckpointError
from hlatctl.run.journal import Event
from trainer.data import tokenizer
from trainer.data.documents import sources_of
from trainer.data.encoder import Tokens, make_encoder
from trainer.data.packing import Deal, Position, Row, Span

_STOP_POLL_S = 0.1

#: For each row of the global batch: the number of batches drawn, then its position's numbers; JSON.
State = list[list[int]]


@dataclass(frozen=True)
class _Batch:
    """Tokens (rows, seq_len + 1), their spans, the batch's number, and the rows' positions after it."""

    tokens: Tokens
    spans: list[list[Span]]
    number: int
    after: list[Position]


class Loader:
    """Returns a rank's share of each step's sequences.

    Args:
        config: of the run.
        dataset: ``dataset.json``.
        rank: data-parallel rank.
        size: data-parallel size.
        state: the concatenated :attr:`state` lists of all ranks, in order, for any number of ranks.
        events: of the journal, equal on all ranks; their ``amended`` events add batches to skip.

    Raises:
        DataError: the corpus can't be read, or is empty.
        CheckpointError: the state belongs to another global batch size.
    """

    def __init__(
        self,
        config: Config,
        dataset: dict[str, Any],
        *,
        rank: int,
        size: int,
        state: State | None = None,
        events: Iterable[Event] = (),
    ) -> None:
        # One thread per rank: the other cores are for the computation.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.sources = sources_of(dataset)
        rows = config.train.global_batch_size
        self._seq_len, self._skip = config.train.seq_len, skipped_batches(config, events)
        self.batch, positions = _positions(state, rows, len(self.sources))
        """Number of the last batch taken, 1-based, including skipped ones."""
        deal = Deal(
            [len(source.documents) for source in self.sources],
            keys=[source.fingerprint for source in self.sources],
            weights=[source.weight for source in config.data.sources] or [1.0] * len(self.sources),
            rows=rows,
            seed=config.seed,
        )
        encode = make_encoder(tokenizer.load(Path(dataset["tokenizer"]["path"]) / tokenizer.TOKENIZER_JSON))
        documents = [source.documents for source in self.sources]
        mine = range(rows // size * rank, rows // size * (rank + 1))
        eos_id = int(dataset["tokenizer"]["eos_id"])
        own = [Row(documents, deal, encode, eos_id=eos_id, row=i, start=positions[i]) for i in mine]
        self._taken = [row.position for row in own]
        self.spans: list[list[Span]] = []
        """For each of this rank's sequences of the last batch, its spans; they index :attr:`sources`."""
        self._queue: queue.Queue[_Batch | BaseException] = queue.Queue(maxsize=config.data.prefetch_batches)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(own, self.batch), name="loader", daemon=True)
        self._thread.start()
        self.wait_s = 0.0
        """Seconds that :meth:`next` has waited since this was last set to 0."""

    @property
    def state(self) -> State:
        """The positions of this rank's rows after the last batch taken."""
        return [[self.batch, *position.to_json()] for position in self._taken]

    def next(self) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the rank's next step, each (sequences, seq_len) int64 on the CPU; may wait."""
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
        self._thread.join()

    def _produce(self, rows: list[Row], number: int) -> None:
        try:
            while not self._stopping.is_set():
                number += 1
                tokens = np.stack([row.take(self._seq_len) for row in rows])
                if number not in self._skip:
                    self._put(_Batch(tokens, [row.spans for row in rows], number, [row.position for row in rows]))
        except BaseException as error:  # the thread that waits for batches raises it
            self._put(error)

    def _put(self, item: _Batch | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                return self._queue.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue


def _positions(state: State | None, rows: int, sources: int) -> tuple[int, list[Position]]:
    """Return the number of batches drawn, and each row's position."""
    if state is None:
        return 0, [Position.start(sources)] * rows
    try:
        entries = [[int(number) for number in entry] for entry in state]
        batches = {entry[0] for entry in entries}
        positions = [Position.from_json(entry[1:], sources) for entry in entries]
    except (TypeError, ValueError, IndexError):
        raise CheckpointError(f"the data loader's state is invalid: {str(state)[:200]}") from None
    if len(positions) != rows:
        raise CheckpointError(
            f"the checkpoint's global batch has {len(positions)} sequences, train.global_batch_size={rows}",
            hint=f"resume with train.global_batch_size={len(positions)}",
        )
    if len(batches) != 1:
        raise CheckpointError(f"the checkpoint's ranks have drawn different numbers of batches: {sorted(batches)}")
    return batches.pop(), positions
