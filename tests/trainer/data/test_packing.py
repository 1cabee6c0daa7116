"""Packing: no token is lost, none is seen twice, and any position can be gone on from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import Batch, Encode, Position, batches, rank_order

_EOS = 0


def _encode(texts: list[str]) -> list[list[int]]:
    return [[ord(character) for character in text] for text in texts]


def _stream(
    documents: Sequence[str], batch_tokens: int, *, seed: int = 1, rank: int = 0, size: int = 1,
    start: Position | None = None, encode: Encode = _encode,
) -> list[Batch]:  # fmt: skip
    stream = batches(
        documents, encode, eos_id=_EOS, batch_tokens=batch_tokens, seed=seed, rank=rank, size=size,
        start=start or Position(),
    )  # fmt: skip
    return list(itertools.islice(stream, 40))


def _documents() -> st.SearchStrategy[list[str]]:
    """Documents that can be told apart: no two share a character."""
    lengths = st.lists(st.integers(1, 70), min_size=3, max_size=80)

    def build(sizes: list[int]) -> list[str]:
        codes = itertools.count(1)
        return ["".join(chr(next(codes)) for _ in range(size)) for size in sizes]

    return lengths.map(build)


@given(documents=_documents(), size=st.integers(1, 3), seed=st.integers(0, 5), batch_tokens=st.integers(1, 50))
def test_an_epoch_of_all_ranks_has_every_token_once(
    documents: list[str], size: int, seed: int, batch_tokens: int
) -> None:
    seen: list[int] = []
    for rank in range(size):
        mine = [documents[i] for i in rank_order(len(documents), seed=seed, epoch=0, rank=rank, size=size)]
        count = sum(len(text) + 1 for text in mine)
        stream = batches(
            documents, _encode, eos_id=_EOS, batch_tokens=batch_tokens, seed=seed, rank=rank, size=size,
            start=Position(),
        )  # fmt: skip
        inputs = (int(token) for batch in stream for token in batch.tokens[:-1])
        got = list(itertools.islice(inputs, count))
        assert got == [code for text in mine for code in (*_encode([text])[0], _EOS)]
        seen += got
    expected = [code for text in documents for code in (*_encode([text])[0], _EOS)]
    assert sorted(seen) == sorted(expected)


@given(documents=_documents(), batch_tokens=st.integers(1, 90), cut=st.integers(0, 38))
def test_stream_goes_on_identically_from_any_batch(documents: list[str], batch_tokens: int, cut: int) -> None:
    whole = _stream(documents, batch_tokens)
    resumed = _stream(documents, batch_tokens, start=whole[cut].after)
    for expected, batch in zip(whole[cut + 1 :], resumed, strict=False):
        np.testing.assert_array_equal(batch.tokens, expected.tokens)
        assert batch.after == expected.after


@given(documents=_documents(), batch_tokens=st.integers(1, 90))
def test_last_target_of_a_batch_is_the_first_input_of_the_next(documents: list[str], batch_tokens: int) -> None:
    found = _stream(documents, batch_tokens)
    assert all(len(batch.tokens) == batch_tokens + 1 for batch in found)
    assert all(a.tokens[-1] == b.tokens[0] for a, b in itertools.pairwise(found))


def test_order_changes_with_epoch_and_seed_and_covers_all_ranks() -> None:
    orders = [rank_order(50, seed=seed, epoch=epoch, rank=0, size=1).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    parts = [rank_order(50, seed=1, epoch=0, rank=rank, size=3).tolist() for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(50))


def test_tokens_are_a_numpy_buffer_and_one_call_encodes_many_documents() -> None:
    calls: list[int] = []

    def counting(texts: list[str]) -> list[list[int]]:
        calls.append(len(texts))
        return _encode(texts)

    (first, *_) = _stream(["ab"] * 100, 8, encode=counting)
    assert first.tokens.dtype == np.int32
    assert max(calls) == 32
