"""Packing: no token is lost or seen twice, weights are obeyed, and packing can continue from any position."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run.errors import CheckpointError
from trainer.data.packing import Deal, PackedRow, Permutation, Position
from trainer.data.tokenizer import Tokens

_EOS = 0


def _encode(text: str) -> Tokens:
    return np.array([ord(character) for character in text], dtype=np.int32)


def _deal(
    *counts: int,
    rows: int = 1,
    seed: int = 1,
    weights: Sequence[float] | None = None,
    lengths: Sequence[float] | None = None,
    key: str = "k",
) -> Deal:
    keys = [f"{key}{index}" for index in range(len(counts))]
    ones = [1.0] * len(counts)
    return Deal(counts, keys=keys, weights=weights or ones, lengths=lengths or ones, rows=rows, seed=seed)


def _row(sources: Sequence[Sequence[str]], deal: Deal, *, row: int = 0, start: Position | None = None) -> PackedRow:
    return PackedRow(sources, deal, _encode, eos_id=_EOS, row=row, start=start or Position.start(len(sources)))


def _documents() -> st.SearchStrategy[list[str]]:
    """Documents that can be told apart: no two share a character."""

    def build(sizes: list[int]) -> list[str]:
        codes = itertools.count(0x4E00)  # no white space: a document of it alone has no text
        return ["".join(chr(next(codes)) for _ in range(size)) for size in sizes]

    return st.lists(st.integers(1, 70), min_size=5, max_size=80).map(build)


def _tokens(documents: Sequence[str]) -> list[int]:
    return [token for text in documents for token in (*_encode(text).tolist(), _EOS)]


def _epoch(deal: Deal, row: int, epoch: int, share: int) -> list[int]:
    return [deal.document(row, 0, epoch * share + nth) for nth in range(share)]


@given(documents=_documents(), rows=st.integers(1, 5), seed=st.integers(0, 5), seq_len=st.integers(1, 50))
def test_an_epoch_of_all_rows_has_every_token_once(documents: list[str], rows: int, seed: int, seq_len: int) -> None:
    deal = _deal(len(documents), rows=rows, seed=seed)
    seen: list[int] = []
    for index in range(rows):
        row = _row([documents], deal, row=index)
        expected = _tokens([documents[i] for i in _epoch(deal, index, 0, len(range(index, len(documents), rows)))])
        inputs: list[int] = []
        while len(inputs) < len(expected):
            inputs += row.take(seq_len)[:-1].tolist()
        assert inputs[: len(expected)] == expected
        seen += expected
    assert sorted(seen) == sorted(_tokens(documents))


@given(
    documents=_documents(),
    more=_documents(),
    seq_len=st.integers(1, 90),
    cut=st.integers(0, 20),
    weight=st.floats(0.1, 10),
)
def test_row_continues_identically_from_any_position(
    documents: list[str], more: list[str], seq_len: int, cut: int, weight: float
) -> None:
    sources = [documents, more]

    def deal() -> Deal:
        return _deal(len(documents), len(more), rows=2, weights=[1.0, weight])

    whole = _row(sources, deal(), row=1)
    for _ in range(cut):
        whole.take(seq_len)
    kept = Position.from_json(whole.position.to_json(), 2)
    resumed = _row(sources, deal(), row=1, start=kept)
    for _ in range(30):
        np.testing.assert_array_equal(resumed.take(seq_len), whole.take(seq_len))
        assert resumed.position == whole.position
        assert resumed.spans == whole.spans


@given(documents=_documents(), seq_len=st.integers(1, 90))
def test_last_target_of_a_sequence_is_the_first_input_of_the_next(documents: list[str], seq_len: int) -> None:
    row = _row([documents], _deal(len(documents)))
    sequences = [row.take(seq_len) for _ in range(20)]
    assert all(len(tokens) == seq_len + 1 and tokens.dtype == np.int32 for tokens in sequences)
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(sequences))


@given(documents=_documents(), seq_len=st.integers(1, 90))
def test_spans_say_where_every_input_came_from(documents: list[str], seq_len: int) -> None:
    row = _row([documents], _deal(len(documents)))
    for _ in range(20):
        inputs = row.take(seq_len)[:-1].tolist()
        told = [_tokens([documents[s.document]])[s.first : s.first + s.tokens] for s in row.spans]
        assert list(itertools.chain(*told)) == inputs


def test_order_changes_with_epoch_seed_and_corpus_and_deals_every_document() -> None:
    orders = {
        tuple(_epoch(_deal(50, seed=seed, key=key), 0, epoch, 50))
        for seed in (1, 2)
        for epoch in (0, 1)
        for key in ("a", "b")
    }
    assert len(orders) == 8
    deal = _deal(50, rows=3)
    dealt = [
        deal.document(row, 0, 7 * share + nth) for row, share in ((0, 17), (1, 17), (2, 16)) for nth in range(share)
    ]
    assert sorted(dealt) == list(range(50))


def test_fewer_documents_than_rows_are_read_by_every_row_in_its_own_order() -> None:
    deal = _deal(4, rows=30)
    orders = [_epoch(deal, row, 0, 4) for row in range(30)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 5


def test_weights_are_shares_of_tokens_whatever_the_lengths_of_documents() -> None:
    lengths, weights, rows = (100, 3000), (0.7, 0.3), 8
    deal = _deal(10**6, 10**6, rows=rows, weights=weights)
    firsts = []
    for row in range(rows):
        finished = [(0, 0), (0, 0)]
        sources = []
        while (total := sum(tokens for _, tokens in finished)) < 2_000_000:
            source = deal.source(row, finished)
            sources.append(source)
            documents, tokens = finished[source]
            finished[source] = (documents + 1, tokens + lengths[source])
        firsts.append(tuple(sources[:40]))
        assert finished[1][1] / total == pytest.approx(0.3, abs=0.03)
    assert len(set(firsts)) == rows, "rows do not change sources in step"


def test_a_small_source_is_repeated_while_a_large_one_goes_on() -> None:
    small, large = ["a" * 500, "b" * 500], [chr(1000 + i) * 500 for i in range(900)]
    row = _row([small, large], _deal(2, 900, weights=[1.0, 1.0]))
    seen = Counter(span.document for _ in range(300) for span in (row.take(500), row.spans)[1] if span.source == 1)
    (small_documents, _), (large_documents, _) = row.position.finished
    assert small_documents > 50, "many epochs of the small one"
    assert large_documents < 900
    assert max(seen.values()) <= 2, "a document of the large one lies in one sequence, or two that follow each other"


def test_position_of_another_mixture_is_refused_but_added_sources_begin() -> None:
    assert Position.from_json([5, 1, 20], 2) == Position(5, ((1, 20), (0, 0)))
    for numbers in ([5, 1, 20, 3, 40], [5, 1], [5], [-1, 0, 0]):
        with pytest.raises(CheckpointError, match="the data loader's state is not a state of 1 sources"):
            Position.from_json(numbers, 1)


def test_document_longer_than_many_sequences_is_encoded_once() -> None:
    calls: list[str] = []

    def counting(text: str) -> Tokens:
        calls.append(text)
        return _encode(text)

    row = PackedRow([["a" * 1000]], _deal(1), counting, eos_id=_EOS, row=0, start=Position.start(1))
    for _ in range(10):
        row.take(90)
    assert len(calls) == 1


@given(size=st.integers(0, 3000), key=st.text(max_size=8))
def test_every_element_has_one_place(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation[place] for place in range(size)) == list(range(size))


@given(size=st.integers(2**40, 2**60), place=st.integers(0, 2**40 - 1))
def test_size_needs_neither_memory_nor_time(size: int, place: int) -> None:
    permutation = Permutation(size, "large")
    assert 0 <= permutation[place] < size
    assert permutation[place] == Permutation(size, "large")[place]


def test_order_is_the_same_on_every_machine() -> None:
    """A checkpoint names places in it."""
    assert [Permutation(10, "1 0 corpus")[place] for place in range(10)] == [1, 3, 7, 6, 4, 5, 2, 0, 8, 9]


def test_orders_of_different_keys_share_no_more_places_than_chance() -> None:
    """Two random orders of n agree in one place on average; the variance is 1 too."""
    size = 2000
    for first, second in (("a", "b"), ("1 0 x", "1 1 x"), ("1 0 x", "2 0 x")):
        one, other = Permutation(size, first), Permutation(size, second)
        assert sum(one[place] == other[place] for place in range(size)) < 10


@pytest.mark.parametrize("size", [97, 1000, 4096])
def test_order_looks_shuffled(size: int) -> None:
    """As many rises as falls, elements spread evenly over the places, and neighbours torn apart."""
    order = [Permutation(size, "seed")[place] for place in range(size)]
    pairs = list(itertools.pairwise(order))
    rises = sum(a < b for a, b in pairs)
    # Eulerian: the mean is (n - 1) / 2, the variance (n + 1) / 12.
    assert abs(rises - (size - 1) / 2) < 5 * ((size + 1) / 12) ** 0.5
    assert sum(abs(a - b) == 1 for a, b in pairs) < 12, "two a permutation on average"
    low_first_half = sum(element < size // 2 for element in order[: size // 2])
    assert abs(low_first_half - size / 4) < 5 * (size**0.5 / 4)


def test_small_sizes_have_all_their_orders() -> None:
    orders = {tuple(Permutation(4, str(key))[place] for place in range(4)) for key in range(1000)}
    assert len(orders) == 24


@pytest.mark.parametrize("place", [-1, 5])
def test_place_outside_is_refused(place: int) -> None:
    with pytest.raises(IndexError):
        Permutation(5, "x")[place]
