"""Pack documents into endless rows of tokens in a shuffled order, and track the position in them. No threads.

Every sequence of the global batch is a row: an endless stream. So one step sees as many different documents as it has
sequences, and a row's content depends only on (corpus, weights, seed, row), never on the number of processes. In each
epoch a source's documents are shuffled again and dealt to the rows. Each is followed by the end-of-sequence token; the
rest of one opens the row's next sequence. No token is lost or seen twice. A document without text gives no tokens.

The shuffled order is computed, never stored: ``Permutation`` maps a place to an element and keeps only a key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import numpy as np

from hlatctl.run.errors import CheckpointError, DataError
from trainer.data.remote import ReadAhead
from trainer.data.tokenizer import Encode, Tokens

#: Luby and Rackoff (1988) need four rounds of a strong round function; the others are for very small sizes.
_ROUNDS = 8
_ROUND_BYTES = 8


class Permutation:
    """A bijection of ``range(size)``, a pure function of its key.

    A Feistel network over a rectangle of about sqrt(size) x sqrt(size) (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"): each round adds a keyed hash of one coordinate to the other. If the resulting cell is outside the
    range, which few are, it is scrambled again.

    Args:
        size: size of the range.
        key: a text; equal keys give equal orders on every machine.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._key = blake2b(key.encode(), digest_size=32).digest()
        self._width = math.isqrt(max(size - 1, 0)) + 1
        self._height = -(-size // self._width)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(place)
        element = self._scramble(place)
        while element >= self._size:
            element = self._scramble(element)
        return element

    def _scramble(self, cell: int) -> int:
        row, column = divmod(cell, self._width)
        for step in range(_ROUNDS):
            if step % 2:
                row = (row + self._hash(step, column)) % self._height
            else:
                column = (column + self._hash(step, row)) % self._width
        return row * self._width + column

    def _hash(self, step: int, value: int) -> int:
        data = (value * _ROUNDS + step).to_bytes(_ROUND_BYTES, "little")
        return int.from_bytes(blake2b(data, digest_size=_ROUND_BYTES, key=self._key).digest(), "little")


#: Tokens by which a row's mixture may deviate from the weights, plus one document: room for chance, so that the rows
#: of a batch do not change sources simultaneously.
_SLACK_TOKENS = 65_536
#: Limit of documents without text, in files that are used where they lie, that a row may draw in succession.
_MOST_EMPTY = 100_000


@dataclass(frozen=True)
class Position:
    """The position of a row's next token.

    ``token`` tokens of the open document are taken. ``finished`` has, for each source, the number of finished documents
    and of their tokens. ``source`` is that of the open document; None: no document is open.
    """

    token: int
    finished: tuple[tuple[int, int], ...]
    source: int | None = None

    @classmethod
    def start(cls, sources: int) -> Position:
        """Return the position before anything is drawn."""
        return cls(0, ((0, 0),) * sources)

    def to_json(self) -> list[int]:
        """Return a flat list of numbers."""
        opened = [] if self.source is None else [self.source]
        return [self.token, *(number for pair in self.finished for number in pair), *opened]

    @classmethod
    def from_json(cls, numbers: Sequence[int], sources: int) -> Position:
        """Return the position of a :meth:`to_json` list; sources that were added since then begin at their start.

        Raises a CheckpointError if the list is invalid, or had more sources.
        """
        token, *counts = numbers
        source = counts.pop() if len(counts) % 2 else None
        if not counts or (source or 0) >= sources or len(counts) > 2 * sources or min(numbers) < 0:
            raise CheckpointError(f"the data loader's state is not a state of {sources} sources: {str(numbers)[:200]}")
        pairs = list(zip(counts[::2], counts[1::2], strict=True))
        return cls(token, (*pairs, *[(0, 0)] * (sources - len(pairs))), source)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a document in a sequence.

    Args:
        document: its position in the source.
        first: its first token, counted in the document.
        tokens: number of tokens; the end-of-sequence token is the document's last.
    """

    source: int
    document: int
    first: int
    tokens: int


class Deal:
    """Which documents a row gets, and in which order: a pure function without state.

    Args:
        counts: number of documents of each source.
        keys: for each source, what its order depends on besides the seed, such as its fingerprint.
        weights: the sources' shares of the tokens.
        lengths: estimates of the mean tokens of each source's documents; they may be wrong by any factor.
        rows: rows of the global batch. With fewer documents than rows, each row goes through all documents.
        seed: seed of the shuffling.
    """

    def __init__(
        self,
        counts: Sequence[int],
        *,
        keys: Sequence[str],
        weights: Sequence[float],
        lengths: Sequence[float],
        rows: int,
        seed: int,
    ) -> None:
        self._lengths = [max(1.0, length) for length in lengths]
        self._counts, self._keys, self._rows, self._seed = list(counts), list(keys), rows, seed
        self._shares = [weight / sum(weights) for weight in weights]

    def source(self, row: int, finished: Sequence[tuple[int, int]]) -> int:
        """Draw the source of a row's next document among those that are behind their share of the tokens.

        A source's chance is the number of documents it is behind, after the next :data:`_SLACK_TOKENS`. So no row
        deviates from the weights by more than these and a document, and no two rows have the same order. Documents, and
        not tokens: otherwise sources of long documents would always be ahead, by up to :data:`_SLACK_TOKENS` a row.
        """
        if len(self._shares) == 1:
            return 0
        total = sum(tokens for _, tokens in finished) + _SLACK_TOKENS
        chances = [
            max(0.0, share * total - had) / length
            for share, (_, had), length in zip(self._shares, finished, self._lengths, strict=True)
        ]
        lot = _uniform(f"{self._seed} {row} {[documents for documents, _ in finished]}") * sum(chances)
        for source, chance in enumerate(chances):
            lot -= chance
            if lot < 0:
                return source
        return int(np.argmax(chances))  # rounding has used up the rest of the probability

    def document(self, row: int, source: int, nth: int) -> int:
        """Return the position of the ``nth`` document (0-based) that a row draws from a source."""
        count, rows = self._counts[source], self._rows
        if count < rows:
            epoch, place = divmod(nth, count)
            return Permutation(count, self._key(source, epoch, row))[place]
        epoch, place = divmod(nth, len(range(row, count, rows)))
        return Permutation(count, self._key(source, epoch))[row + rows * place]

    def _key(self, source: int, epoch: int, *more: int) -> str:
        return " ".join(map(str, (self._seed, epoch, self._keys[source], *more)))


class PackedRow:
    """One row, starting at a position.

    Args:
        documents: each source's texts, or its token ids with the end-of-sequence token; or readers that read ahead.
        deal: the deal, shared by all rows.
        encode: encodes a text, without special tokens.
        eos_id: ends each document.
        row: the row's index in the global batch.
        start: position to continue from.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[str] | Sequence[Tokens] | ReadAhead],
        deal: Deal,
        encode: Encode,
        *,
        eos_id: int,
        row: int,
        start: Position,
    ) -> None:
        self._documents, self._deal, self._encode, self._eos_id, self._row = documents, deal, encode, eos_id, row
        self.position = start
        self.spans: list[Span] = []
        """The spans of the last sequence taken."""
        self._tokens: Tokens | None = None
        self._source = self._document = self._empty = 0

    def take(self, seq_len: int) -> Tokens:
        """Return ``seq_len + 1`` tokens; the last one, the last target, is also the next sequence's first."""
        packed = np.empty(seq_len + 1, dtype=np.int32)
        filled = 0
        self.spans = []
        while True:
            if self._tokens is None:
                self._tokens = self._open()
            first = self.position.token
            part = self._tokens[first:][: len(packed) - filled]
            packed[filled : filled + len(part)] = part
            filled += len(part)
            taken = len(part) - (filled == len(packed))
            if taken > 0:
                self.spans.append(Span(source=self._source, document=self._document, first=first, tokens=taken))
            if filled == len(packed):
                token = first + taken
                self.position = replace(self.position, token=token, source=self._source if token else None)
                return packed
            self._finish_document()

    def _open(self) -> Tokens:
        finished = self.position.finished
        opened = self.position.source
        source = self._source = self._deal.source(self._row, finished) if opened is None else opened
        nth = finished[source][0]
        self._document = self._deal.document(self._row, source, nth)
        documents = self._documents[source]
        if isinstance(documents, ReadAhead):
            document = documents.read(self._row, nth, partial(self._deal.document, self._row, source))
        else:
            document = documents[self._document]
        tokens = encoded(document, self._encode, self._eos_id)
        self._empty = 0 if len(tokens) else self._empty + 1
        if self._empty > _MOST_EMPTY:
            raise DataError(
                f"data: {_MOST_EMPTY:,} documents without text in succession", hint="remove them from the corpus"
            )
        return tokens

    def _finish_document(self) -> None:
        assert self._tokens is not None
        finished = list(self.position.finished)
        documents, tokens = finished[self._source]
        finished[self._source] = (documents + 1, tokens + len(self._tokens))
        self.position = Position(0, tuple(finished))
        self._tokens = None


def encoded(document: str | Tokens, encode: Encode, eos_id: int) -> Tokens:
    """Return a document's tokens with the end-of-sequence token; none if it has no text."""
    if not isinstance(document, str):
        return document
    if not document or document.isspace():
        return np.empty(0, dtype=np.int32)
    return np.append(encode(document), np.int32(eos_id))


def _uniform(key: str) -> float:
    """Return a pseudo-random number in [0, 1), a pure function of a key."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") / 2**64
