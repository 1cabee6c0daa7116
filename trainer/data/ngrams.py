"""Find n-grams of words in text, by hash and with an exact check of each hit.

Words are those of GPT-3's overlap study: runs of characters between white space, in lower case and without punctuation
(Brown et al. 2020, arXiv 2005.14165, appendix C). The n-grams to find are kept in memory as sorted 64-bit
hashes, and text is streamed past them. A hit is compared word for word, so a result never depends on a hash.
Text without spaces between words, such as Chinese, has few n-grams of this kind.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: Text hashed in one block: the arrays of a block stay in the second-level cache. Longer documents are cut.
BLOCK_BYTES = 128 << 10
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]+")


def _normal(character: str) -> str:
    """Return a character in lower case, a space for white space, and nothing for punctuation."""
    return " " if character.isspace() else character.lower() if character.isalnum() else ""


_ASCII = [chr(code) for code in range(128)]
#: The same rule as a table for ASCII, and the characters that are removed.
_TABLE = bytes(ord(_normal(c) or c) for c in _ASCII) + bytes(range(128, 256))
_REMOVED = "".join(c for c in _ASCII if not _normal(c)).encode()
#: Odd: the base of the polynomials (2**64 divided by the golden ratio).
_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
#: Bytes that are read together, masks that keep the first 0 to 8 of them, and the longest word that is read so.
_EIGHT, _LONG = 8, 24
_MASKS = np.array([(1 << 8 * length) - 1 for length in range(_EIGHT + 1)], np.uint64)
#: Slots of the filter per n-gram: one hash in this many passes to the binary search.
_SLOTS = 16


def normalise(text: str | bytes) -> bytes:
    """Return the words of a text in UTF-8, separated by spaces. Invalid UTF-8 bytes are removed."""
    content = text.encode("utf-8", "ignore") if isinstance(text, str) else text
    content = content.translate(_TABLE, _REMOVED)
    return content if content.isascii() else _BEYOND_ASCII.sub(lambda match: _normal_run(match[0]), content)


@lru_cache(maxsize=1 << 16)
def _normal_run(run: bytes) -> bytes:
    """Normalize characters beyond ASCII by the same rule. Text repeats them, so most are cached."""
    return "".join(_normal(character) for character in run.decode("utf-8", "ignore")).encode()


@dataclass(frozen=True)
class Block:
    """Some documents for one scan: normalized text with a line per document, where each begins, and their numbers."""

    text: bytes
    starts: list[int]
    documents: list[int]

    def document_at(self, byte: int) -> int:
        """Return the number of the document at a byte of the text."""
        return self.documents[bisect_right(self.starts, byte) - 1]


def blocks(documents: Iterable[tuple[int, bytes]], *, words: int) -> Iterator[Block]:
    """Yield documents, given as number and normalized text, in blocks of at most :data:`BLOCK_BYTES`.

    The pieces of a long document overlap, so that each of its n-grams of ``words`` words is in one of them.
    """
    texts: list[bytes] = []
    starts: list[int] = []
    numbers: list[int] = []
    size = 0
    for number, text in documents:
        for piece in _pieces(text, words):
            if texts and size + len(piece) > BLOCK_BYTES:
                yield Block(b"\n".join(texts), starts, numbers)
                texts, starts, numbers, size = [], [], [], 0
            texts.append(piece)
            starts.append(size)
            numbers.append(number)
            size += len(piece) + 1
    if texts:
        yield Block(b"\n".join(texts), starts, numbers)


def _pieces(text: bytes, words: int) -> Iterator[bytes]:
    """Yield the pieces of a text, which end between words. A word longer than a block is omitted."""
    begin = 0
    while len(text) - begin > BLOCK_BYTES:
        end = text.rfind(b" ", begin, begin + BLOCK_BYTES)
        if end <= begin:
            end = text.find(b" ", begin + 1)
            if end < 0:
                return
            begin = end
            continue
        yield text[begin:end]
        again = end
        for _ in range(words - 1):
            again = text.rfind(b" ", begin, again)
            if again <= begin:
                break
        begin = again if again > begin else end
    yield text[begin:]


class Words:
    """The words of a normalized text: where each begins and ends, and its hash. ``[words]`` each.

    The hash of an n-gram is a polynomial of the hashes of its words modulo 2**64, the difference of two running sums.
    It costs the same for any number of words.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        buffer = np.frombuffer(text, np.uint8)
        inside = np.zeros(len(buffer) + 2, np.bool_)
        np.greater(buffer, 32, out=inside[1:-1])
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        self.starts, self.ends = edges[::2], edges[1::2]
        powers, self._inverses = _powers(max(len(self), BLOCK_BYTES))
        self._sums = _running_sums(_of_words(text, self.starts, self.ends) * powers[: len(self)])

    def __len__(self) -> int:
        return len(self.starts)

    def ngrams(self, words: int) -> Hashes:
        """Return the hash of the n-gram that begins at each word, ``[words in the text - n + 1]``."""
        inverses = self._inverses[: max(0, len(self) - words + 1)]
        return _mixed((self._sums[words:] - self._sums[:-words]) * inverses)

    def ngram(self, word: int, words: int) -> bytes:
        """Return an n-gram with one space between words; with a newline if it crosses a line."""
        text = self.text[self.starts[word] : self.ends[word + words - 1]]
        return text if b"\n" in text else b" ".join(text.split())


class Table:
    """The n-grams to find, from some texts.

    Equal hashes count as one n-gram: of N different ones, two are confused with a probability of N**2 / 2**65.

    Args:
        texts: normalized texts; at most :data:`BLOCK_BYTES` of each are used.
        words: number of words in an n-gram.
    """

    def __init__(self, texts: Sequence[bytes], words: int) -> None:
        self.words = words
        hashes, self._places, owners = _of_texts(texts, words)
        self._words_of = lru_cache(maxsize=64)(lambda text: texts[text][:BLOCK_BYTES].split())
        self.hashes, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        self._first = first
        #: At each place, the n-gram's number, and the number of the text that contains the place.
        self.ngram_of, self.text_of = inverse.astype(np.int64), owners
        bits = max(10, int(np.ceil(np.log2(max(1, len(self.hashes)) * _SLOTS))))
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.bool_)
        self._filter[self.hashes >> self._shift] = True

    def __len__(self) -> int:
        """Return the number of different n-grams."""
        return len(self.hashes)

    def place(self, ngram: int) -> int:
        """Return a number that grows with the place of an n-gram in the texts."""
        return int(self._first[ngram])

    def text(self, ngram: int) -> bytes:
        """Return the words of an n-gram, with one space between them."""
        place = self._first[ngram]
        begin = int(self._places[place])
        return b" ".join(self._words_of(int(self.text_of[place]))[begin : begin + self.words])

    def find(self, block: Words, known: Flags) -> Iterator[tuple[int, int]]:
        """Yield the number of each n-gram that is in a text and not yet known, and its first byte there.

        ``known`` has a flag for each n-gram, ``[len(self)]``; the flags of found ones are set.
        """
        if not len(self) or len(block) < self.words:
            return
        hashes = block.ngrams(self.words)
        likely = np.flatnonzero(self._filter[hashes >> self._shift])
        at = np.searchsorted(self.hashes, hashes[likely])
        at[at == len(self)] = 0
        new = (self.hashes[at] == hashes[likely]) & ~known[at]
        for ngram, word in zip(at[new].tolist(), likely[new].tolist(), strict=True):
            if not known[ngram] and block.ngram(word, self.words) == self.text(ngram):
                known[ngram] = True
                yield ngram, int(block.starts[word])


def _of_texts(texts: Sequence[bytes], words: int) -> tuple[Hashes, Numbers, Numbers]:
    """Return the hash of each n-gram, the number of its first word in its text, and the text's number."""
    found: list[Hashes] = [np.empty(0, np.uint64)]
    places: list[Numbers] = [np.empty(0, np.int64)]
    owners: list[Numbers] = [np.empty(0, np.int64)]
    for block in blocks(((number, text[:BLOCK_BYTES]) for number, text in enumerate(texts)), words=words):
        split = Words(block.text)
        line = np.searchsorted(np.array(block.starts), split.starts, side="right") - 1
        first = np.searchsorted(split.starts, np.array(block.starts))
        if len(split) < words:
            continue
        whole = np.flatnonzero(line[: len(split) - words + 1] == line[words - 1 :])
        found.append(split.ngrams(words)[whole])
        places.append(whole - first[line[whole]])
        owners.append(np.array(block.documents, np.int64)[line[whole]])
    return np.concatenate(found), np.concatenate(places), np.concatenate(owners)


def _mixed(values: Hashes) -> Hashes:
    """Return values whose high bits depend on all bits."""
    values ^= values >> _HALF
    values *= _MIX
    values ^= values >> _HALF
    values *= _MIX
    return values


def _running_sums(values: Hashes) -> Hashes:
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    return sums


def _of_words(text: bytes, starts: Numbers, ends: Numbers) -> Hashes:
    """Return the hash of each word, from eight bytes at a time; the few longer words are hashed one by one."""
    eight = np.ndarray((len(text) + 2 * _EIGHT + 1,), "<u8", text + bytes(_LONG), strides=(1,))
    lengths = ends - starts
    hashes = _mixed(eight[starts] & _MASKS[np.minimum(lengths, _EIGHT)])
    for first in range(_EIGHT, _LONG, _EIGHT):
        longer = np.flatnonzero(lengths > first)
        more = eight[starts[longer] + first] & _MASKS[np.minimum(lengths[longer] - first, _EIGHT)]
        hashes[longer] = _mixed(hashes[longer] ^ more)
    for word in np.flatnonzero(lengths > _LONG).tolist():
        digest = blake2b(text[starts[word] : ends[word]], digest_size=_EIGHT).digest()
        hashes[word] = int.from_bytes(digest, "little")
    return hashes


@lru_cache(maxsize=1)
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """Return the powers of the base from 0 modulo 2**64, and their inverses."""
    return _running_products(_BASE, size), _running_products(pow(_BASE, -1, 1 << 64), size)


def _running_products(base: int, length: int) -> Hashes:
    values = np.full(length, base, np.uint64)
    values[:1] = 1
    return np.cumprod(values, dtype=np.uint64)
