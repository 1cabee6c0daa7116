"""The packed batches of one data-parallel rank, made in the background while the device computes.

The state is that of the batches taken, never of those made ahead, so a checkpoint resumes at the very next token.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hlatctl.run.errors import CheckpointError, DataError
from trainer.data import tokenizer
from trainer.data.documents import Documents
from trainer.data.packing import Batch, Position, batches

_STOP_POLL_S = 0.1


class Loader:
    """Yields (inputs, targets), each (micro_batch_size, seq_len) int64 on the CPU.

    Args:
        dataset: ``dataset.json``.
        micro_batch_size: sequences.
        seq_len: tokens.
        seed: of the documents' order.
        rank: data-parallel rank.
        size: data-parallel size.
        prefetch_batches: made ahead at most.
        state: where to go on, from :attr:`state` of an equal loader.

    Raises:
        DataError: the corpus can't be read, or has fewer documents than there are ranks.
        CheckpointError: the state is not one.
    """

    def __init__(
        self, dataset: dict[str, Any], *, micro_batch_size: int, seq_len: int, seed: int, rank: int, size: int,
        prefetch_batches: int, state: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        # One thread a rank: the cores belong to the computation.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        documents = Documents([Path(entry["path"]) for entry in dataset["files"]])
        if len(documents) < size:
            raise DataError(
                f"data.path: {len(documents)} training documents for {size} data-parallel processes; each needs one",
                hint="give a larger corpus, or lower cluster.processes_per_node",
            )
        self._encoder = tokenizer.load(Path(dataset["tokenizer"]["path"]) / tokenizer.TOKENIZER_JSON)
        self._shape = (micro_batch_size, seq_len)
        self._position = _position(state)
        stream = batches(
            documents, self._encode, eos_id=int(dataset["tokenizer"]["eos_id"]),
            batch_tokens=micro_batch_size * seq_len, seed=seed, rank=rank, size=size, start=self._position,
        )  # fmt: skip
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=prefetch_batches)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(stream,), name="loader", daemon=True)
        self._thread.start()
        self.wait_s = 0.0
        """Time that :meth:`next` has waited since this was last set to 0."""

    @property
    def state(self) -> dict[str, int]:
        """The position after the last batch taken, as JSON."""
        return asdict(self._position)

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch; waits for it if need be."""
        started = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        self._position = item.after
        tokens = torch.from_numpy(item.tokens).long()
        return tokens[:-1].view(self._shape), tokens[1:].view(self._shape)

    def close(self) -> None:
        """Stop the background thread."""
        self._stopping.set()
        self._thread.join()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def _produce(self, stream: Iterator[Batch]) -> None:
        try:
            for batch in stream:
                if not self._put(batch):
                    return
        except BaseException as error:  # handed to the thread that waits for batches, which raises it
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._stopping.is_set():
            try:
                self._queue.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue
            return True
        return False


def _position(state: dict[str, int] | None) -> Position:
    if state is None:
        return Position()
    try:
        return Position(**{key: int(value) for key, value in state.items()})
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"the data loader's state is not one: {state!r}") from None
