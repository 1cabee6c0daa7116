"""Documents to endless rows of packed tokens, and where in them one is. No threads: see ``trainer.data.loader``.

Every sequence of the global batch is a row: an endless stream of its own. So one step sees as many different documents
as it has sequences, and what a row holds depends on (documents, seed, row) alone, never on how many processes there
are. In an epoch the documents are shuffled anew and dealt to the rows; each is followed by the end-of-sequence token;
what is left of one opens the row's next sequence. No token is lost or seen twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
#: A text to its ids.
Encode = Callable[[str], Sequence[int]]
Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """The next token to come: epoch, place of its document in the row's order, token within the document."""

    epoch: int = 0
    document: int = 0
    token: int = 0


class Deal:
    """Which documents a row gets in an epoch, and in which order.

    Args:
        count: of documents.
        rows: in the global batch. With fewer documents than rows, each row goes through all of them by itself.
        seed: of the shuffling.
    """

    def __init__(self, count: int, *, rows: int, seed: int) -> None:
        self._count, self._rows, self._seed = count, rows, seed
        self._shuffled: dict[int, Order] = {}

    def order(self, row: int, epoch: int) -> Order:
        """The documents of one row in one epoch."""
        if self._count < self._rows:
            return np.random.default_rng([self._seed, epoch, row]).permutation(self._count)
        if epoch not in self._shuffled:
            # Rows are at most one epoch apart for long; older orders are made again if need be.
            self._shuffled = {known: order for known, order in self._shuffled.items() if known >= epoch - 1}
            self._shuffled[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._count)
        return self._shuffled[epoch][row :: self._rows]


class Row:
    """One row, from a position on.

    Args:
        documents: all of them.
        deal: which of them come here.
        encode: a text to its ids, without special tokens.
        eos_id: ends each document.
        row: index in the global batch.
        start: where to go on.
    """

    def __init__(
        self, documents: Sequence[str], deal: Deal, encode: Encode, *, eos_id: int, row: int, start: Position
    ) -> None:
        self._documents, self._deal, self._encode, self._eos_id, self._row = documents, deal, encode, eos_id, row
        self.position = start
        self._order = deal.order(row, start.epoch)
        self._tokens: Tokens | None = None

    def take(self, seq_len: int) -> Tokens:
        """``seq_len + 1`` tokens; the last one, the last target, also opens what comes next."""
        packed = np.empty(seq_len + 1, dtype=np.int32)
        filled = 0
        while True:
            if self._tokens is None:
                self._tokens = self._open()
            part = self._tokens[self.position.token :][: len(packed) - filled]
            packed[filled : filled + len(part)] = part
            filled += len(part)
            if filled == len(packed):
                self.position = replace(self.position, token=self.position.token + len(part) - 1)
                return packed
            self._next_document()

    def _open(self) -> Tokens:
        ids = self._encode(self._documents[int(self._order[self.position.document])])
        return np.fromiter((*ids, self._eos_id), dtype=np.int32, count=len(ids) + 1)

    def _next_document(self) -> None:
        self._tokens = None
        self.position = Position(self.position.epoch, self.position.document + 1)
        if self.position.document == len(self._order):
            self.position = Position(self.position.epoch + 1)
            self._order = self._deal.order(self._row, self.position.epoch)
