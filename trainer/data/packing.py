"""Documents to an endless stream of packed batches, and where in it one is. No threads: see ``trainer.data.loader``.

The stream of a data-parallel rank is a pure function of (documents, seed, rank, size): the documents in an order
shuffled anew each epoch, every size-th one, each followed by the end-of-sequence token. It is cut every
``batch x seq_len`` tokens, so no token is lost or seen twice, and what is left of a document opens the next sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
#: Texts to one list of ids each.
Encode = Callable[[list[str]], list[list[int]]]

#: How much is tokenised in one call: enough to keep the call's own cost out of sight, little enough to hold.
_ENCODE_DOCUMENTS = 32
_ENCODE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Position:
    """The next token to come: epoch, place of its document in this rank's order, token within the document."""

    epoch: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True)
class Batch:
    """``batch x seq_len + 1`` tokens, the last of which opens the next batch too; and the position after it."""

    tokens: Tokens
    after: Position


def rank_order(count: int, *, seed: int, epoch: int, rank: int, size: int) -> npt.NDArray[np.int64]:
    """The documents of one rank in one epoch, in order."""
    return np.random.default_rng([seed, epoch]).permutation(count)[rank::size]


def batches(
    documents: Sequence[str], encode: Encode, *, eos_id: int, batch_tokens: int, seed: int, rank: int, size: int,
    start: Position,
) -> Iterator[Batch]:  # fmt: skip
    """The stream from a position on, in batches that advance by ``batch_tokens``; it never ends."""
    stream = _token_stream(documents, encode, eos_id=eos_id, seed=seed, rank=rank, size=size, start=start)
    waiting: list[tuple[Position, Tokens]] = []
    held = 0
    while True:
        while held < batch_tokens + 1:
            position, tokens = next(stream)
            waiting.append((position, tokens))
            held += len(tokens)
        *whole, last = [tokens for _, tokens in waiting]
        surplus = held - (batch_tokens + 1)
        tokens = np.concatenate([*whole, last[: len(last) - surplus]])
        waiting, held = _advance(waiting, batch_tokens)
        yield Batch(tokens, waiting[0][0])


def _advance(waiting: list[tuple[Position, Tokens]], count: int) -> tuple[list[tuple[Position, Tokens]], int]:
    """Leave out the first ``count`` tokens; at least one is left."""
    first = 0
    while count >= len(waiting[first][1]):
        count -= len(waiting[first][1])
        first += 1
    at, tokens = waiting[first]
    rest = [(Position(at.epoch, at.document, at.token + count), tokens[count:]), *waiting[first + 1 :]]
    return rest, sum(len(tokens) for _, tokens in rest)


def _token_stream(
    documents: Sequence[str], encode: Encode, *, eos_id: int, seed: int, rank: int, size: int, start: Position
) -> Iterator[tuple[Position, Tokens]]:
    """Each document's tokens with their end, and the position of the first; begins inside a document if need be."""
    epoch, first, skip = start.epoch, start.document, start.token
    while True:
        order = rank_order(len(documents), seed=seed, epoch=epoch, rank=rank, size=size)
        for place, group in _groups(documents, order, first):
            for offset, ids in enumerate(encode(group)):
                tokens = np.fromiter((*ids, eos_id), dtype=np.int32, count=len(ids) + 1)[skip:]
                yield Position(epoch, place + offset, skip), tokens
                skip = 0
        epoch, first = epoch + 1, 0


def _groups(documents: Sequence[str], order: npt.NDArray[np.int64], first: int) -> Iterator[tuple[int, list[str]]]:
    """Texts from a place in the order on, a group for one call of the tokenizer, with the place of its first."""
    place, group, characters = first, list[str](), 0
    for index in range(first, len(order)):
        group.append(documents[int(order[index])])
        characters += len(group[-1])
        if len(group) == _ENCODE_DOCUMENTS or characters >= _ENCODE_CHARACTERS:
            yield place, group
            place, group, characters = index + 1, [], 0
    if group:
        yield place, group
