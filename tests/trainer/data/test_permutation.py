from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.permutation import Permutation


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
