"""Packing: no token is lost, none is seen twice, and any position can be gone on from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import Deal, Position, Row

_EOS = 0


def _encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def _row(documents: Sequence[str], deal: Deal, *, row: int = 0, start: Position | None = None) -> Row:
    return Row(documents, deal, _encode, eos_id=_EOS, row=row, start=start or Position())


def _documents() -> st.SearchStrategy[list[str]]:
    """Documents that can be told apart: no two share a character."""

    def build(sizes: list[int]) -> list[str]:
        codes = itertools.count(1)
        return ["".join(chr(next(codes)) for _ in range(size)) for size in sizes]

    return st.lists(st.integers(1, 70), min_size=5, max_size=80).map(build)


def _tokens(documents: Sequence[str]) -> list[int]:
    return [token for text in documents for token in (*_encode(text), _EOS)]


@given(documents=_documents(), rows=st.integers(1, 5), seed=st.integers(0, 5), seq_len=st.integers(1, 50))
def test_an_epoch_of_all_rows_has_every_token_once(documents: list[str], rows: int, seed: int, seq_len: int) -> None:
    deal = Deal(len(documents), rows=rows, seed=seed)
    seen: list[int] = []
    for index in range(rows):
        expected = _tokens([documents[i] for i in deal.order(index, 0)])
        row = _row(documents, deal, row=index)
        inputs: list[int] = []
        while len(inputs) < len(expected):
            inputs += row.take(seq_len)[:-1].tolist()
        assert inputs[: len(expected)] == expected
        seen += expected
    assert sorted(seen) == sorted(_tokens(documents))


@given(documents=_documents(), seq_len=st.integers(1, 90), cut=st.integers(0, 20))
def test_row_goes_on_identically_from_any_position(documents: list[str], seq_len: int, cut: int) -> None:
    deal = Deal(len(documents), rows=2, seed=1)
    whole = _row(documents, deal, row=1)
    for _ in range(cut):
        whole.take(seq_len)
    resumed = _row(documents, Deal(len(documents), rows=2, seed=1), row=1, start=whole.position)
    for _ in range(30):
        np.testing.assert_array_equal(resumed.take(seq_len), whole.take(seq_len))
        assert resumed.position == whole.position


@given(documents=_documents(), seq_len=st.integers(1, 90))
def test_last_target_of_a_sequence_is_the_first_input_of_the_next(documents: list[str], seq_len: int) -> None:
    row = _row(documents, Deal(len(documents), rows=1, seed=1))
    found = [row.take(seq_len) for _ in range(20)]
    assert all(len(tokens) == seq_len + 1 and tokens.dtype == np.int32 for tokens in found)
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(found))


def test_order_changes_with_epoch_and_seed_and_deals_every_document() -> None:
    orders = {tuple(Deal(50, rows=1, seed=seed).order(0, epoch).tolist()) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4
    deal = Deal(50, rows=3, seed=1)
    assert sorted(itertools.chain(*(deal.order(row, 7).tolist() for row in range(3)))) == list(range(50))


def test_order_of_an_earlier_epoch_is_the_same_again_after_a_later_one() -> None:
    deal = Deal(50, rows=2, seed=1)
    first = deal.order(1, 0).tolist()
    deal.order(1, 9)
    assert deal.order(1, 0).tolist() == first


def test_fewer_documents_than_rows_are_read_by_every_row_in_its_own_order() -> None:
    deal = Deal(4, rows=30, seed=1)
    orders = [deal.order(row, 0).tolist() for row in range(30)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 5


def test_document_longer_than_many_sequences_is_encoded_once() -> None:
    calls: list[str] = []

    def counting(text: str) -> list[int]:
        calls.append(text)
        return _encode(text)

    row = Row(["a" * 1000], Deal(1, rows=1, seed=1), counting, eos_id=_EOS, row=0, start=Position())
    for _ in range(10):
        row.take(90)
    assert len(calls) == 1
