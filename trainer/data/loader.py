"""The reader: the packed sequences of one data-parallel rank, prepared while the device computes.

The state counts batches that were taken, never prefetched ones, so a checkpoint resumes at the next token.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from conf.amend import skipped_batches
from conf.schema import Config
from hlatctl.run.errors import STORAGE_AWAY, CheckpointError, HlatctlError
from hlatctl.run.journal import Event
from trainer.data import tokenizer
from trainer.data.documents import sources_of
from trainer.data.encoder import make_encoder
from trainer.data.packing import Deal, Position, Row
from trainer.data.prefetch import Batch, Batches, State
from trainer.data.read_ahead import ReadAhead
from trainer.data.relay import Sender

#: Time for the other processes to receive an error before the connections to them end.
_TELLS_S = 5.0


class Loader(Batches):
    """Reads a rank's share of each step's sequences.

    Args:
        config: of the run.
        dataset: ``dataset.json``.
        rank: data-parallel rank.
        size: data-parallel size.
        state: the concatenated :attr:`state` lists of all ranks, in order, for any number of ranks.
        events: of the journal, equal on all ranks; their ``amended`` events add batches to skip.
        sender: to other processes that need the same batches; none: no other does.

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
        sender: Sender | None = None,
    ) -> None:
        # One thread per rank: the other cores are for the computation.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.sources = sources_of(dataset)
        rows = config.train.global_batch_size
        first, positions = _positions(state, rows, len(self.sources))
        super().__init__(batch=first, ahead=config.data.prefetch_batches)
        self._seq_len, self._skip, self._sender = config.train.seq_len, skipped_batches(config, events), sender
        deal = Deal(
            [len(source.documents) for source in self.sources],
            keys=[source.fingerprint for source in self.sources],
            weights=[source.weight for source in config.data.sources] or [1.0] * len(self.sources),
            rows=rows,
            seed=config.seed,
        )
        encode = make_encoder(tokenizer.load(Path(dataset["tokenizer"]["path"]) / tokenizer.TOKENIZER_JSON))
        mine = range(rows // size * rank, rows // size * (rank + 1))
        readers = len(mine) * len(self.sources)
        documents = [
            ReadAhead(source.documents, readers) if source.documents.is_remote else source.documents
            for source in self.sources
        ]
        self._ahead = [each for each in documents if isinstance(each, ReadAhead)]
        eos_id = int(dataset["tokenizer"]["eos_id"])
        own = [Row(documents, deal, encode, eos_id=eos_id, row=i, start=positions[i]) for i in mine]
        self._taken = [row.position for row in own]
        self._failing = False
        self._start(lambda: self._produce(own, first))

    def close(self) -> None:
        """Stop the background thread, its requests, and the connections to the other processes."""
        if self._sender and self._failing and self._thread:
            self._thread.join(_TELLS_S)
        self._stopping.set()
        for documents in self._ahead:
            documents.close()
        if self._sender:
            self._sender.stop()  # the thread may be waiting for a slow one
        super().close()
        if self._sender:
            self._sender.close()

    def _produce(self, rows: list[Row], number: int) -> None:
        try:
            while not self._stopping.is_set():
                number += 1
                tokens = np.stack([row.take(self._seq_len) for row in rows])
                if number not in self._skip:
                    self._hand_out(Batch(tokens, number, [row.spans for row in rows], [row.position for row in rows]))
        except HlatctlError as error:
            if self._stopping.is_set():
                return
            if error.code == STORAGE_AWAY:
                step = number - sum(skipped <= number for skipped in self._skip)
                error = type(error)(f"step {step}: {error.message}", hint=error.hint, code=error.code)
            self._failing = True
            self._put(error)  # first: the others may wait for this process, not for their next batch
            if self._sender:
                self._sender.fail(error)

    def _hand_out(self, batch: Batch) -> None:
        """Queue a batch here, then send it. In this order, no process that trains waits for one that sends."""
        self._put(batch)
        if self._sender:
            self._sender.send(batch)


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
            hint=f"a run keeps its batch size: set train.global_batch_size={len(positions)} again",
        )
    if len(batches) != 1:
        raise CheckpointError(f"the checkpoint's ranks have drawn different numbers of batches: {sorted(batches)}")
    return batches.pop(), positions
