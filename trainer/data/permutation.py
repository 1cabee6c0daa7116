"""A shuffled order that is computed, never stored: it maps a place to an element and keeps only a key."""

from __future__ import annotations

import math
from hashlib import blake2b

#: Luby and Rackoff (1988) need four rounds of a strong round function; the others are for very small sizes.
_ROUNDS = 8
_ROUND_BYTES = 8


class Permutation:
    """A bijection of ``range(size)``, a pure function of its key.

    A Feistel network over a rectangle of about sqrt(size) x sqrt(size) (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"): each round adds a keyed hash of one coordinate to the other. If the resulting cell is outside the
    range, which few are, it is scrambled again.

    Args:
        size: of the range.
        key: text; equal keys give equal orders on every machine.
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
