"""Encode text to the tokenizer's exact ids, faster if that is provably possible. No files, no packing.

SentencePiece-style BPE treats a whole document as one word, so its word cache never hits. But if no piece of the
vocabulary has a space after another character, or a line end, then no merge crosses these places. So the words between
them can be encoded one by one with equal ids, and cached. Text repeats its words, so most come from the cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.NDArray[np.int32]
#: Encodes a text to its ids, without special tokens.
Encode = Callable[[str], Tokens]

_SPACE = "▁"
_WORD = re.compile(r" *[^ \n]+| +|\n")
_LINE_END_PIECE = "<0x0A>"
#: Words in a cache generation, about 25 MB; the previous one is kept too, so frequent words are never dropped.
_REMEMBERED_WORDS = 100_000
#: Longer words rarely repeat and are not cached.
_REMEMBERED_CHARACTERS = 64
_UNKNOWN = b"?"  # not ids: these have four bytes each


def make_encoder(tokenizer: Tokenizer) -> Encode:
    """Return the fastest exact encoder of a tokenizer, which it may change.

    Args:
        tokenizer: from :func:`trainer.data.tokenizer.load`.
    """
    whole = _Whole(tokenizer)
    return _ByWord(tokenizer, whole) if splits_at_words(json.loads(tokenizer.to_str())) else whole


def splits_at_words(description: dict[str, Any]) -> bool:
    """Return whether a ``tokenizer.json`` proves that words can be encoded separately."""
    model = description["model"]
    return (
        model["type"] == "BPE"
        and description["pre_tokenizer"] is None
        and _is_metaspace(description["normalizer"])
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not model.get("ignore_merges")
        and model.get("byte_fallback") is True
        and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        and all(token["special"] for token in description["added_tokens"])
        and not any(re.search(rf"[^{_SPACE}]{_SPACE}|\n", piece) for piece in model["vocab"])
    )


def _is_metaspace(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer only prepends a space and replaces spaces, like SentencePiece."""
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return normalizer == {"type": "Sequence", "normalizers": [prepend, replace]}


class _Whole:
    """Encodes a text with one call of the tokenizer, which releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Tokens:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)


class _ByWord:
    """Encodes word by word from a cache; unknown words are encoded in one call."""

    def __init__(self, tokenizer: Tokenizer, whole: Encode) -> None:
        from tokenizers import Tokenizer, normalizers

        self._whole = whole
        words = Tokenizer.from_str(tokenizer.to_str())
        words.encode_special_tokens = True
        words.normalizer = normalizers.Replace(" ", _SPACE)
        self._encode_words = _Whole(words)
        self._line_end = np.int32(tokenizer.get_vocab()[_LINE_END_PIECE])
        self._known: dict[str, bytes] = {}
        self._before: dict[str, bytes] = {}

    def __call__(self, text: str) -> Tokens:
        if _SPACE in text or not text:
            return self._whole(text)  # a visible space in the text itself could merge with a real one
        words = _WORD.findall(f" {text}")
        known = self._known
        encoded = [known.get(word, _UNKNOWN) for word in words]
        if missing := [place for place, ids in enumerate(encoded) if ids is _UNKNOWN]:
            recalled = self._recall({words[place] for place in missing})
            for place in missing:
                encoded[place] = recalled[words[place]]
            self._remember(recalled)
        return np.frombuffer(b"".join(encoded), dtype=np.int32)

    def _remember(self, recalled: dict[str, bytes]) -> None:
        self._known.update((word, ids) for word, ids in recalled.items() if len(word) <= _REMEMBERED_CHARACTERS)
        if len(self._known) > _REMEMBERED_WORDS:
            self._known, self._before = {}, self._known

    def _recall(self, new: set[str]) -> dict[str, bytes]:
        """Return the ids of words, as bytes: from the previous cache generation, or encoded."""
        ids = {word: self._before[word] for word in new if word in self._before}
        ids["\n"] = self._line_end.tobytes()
        unknown = [word for word in new if word not in ids]
        return ids | self._learn(unknown) if unknown else ids

    def _learn(self, words: list[str]) -> dict[str, bytes]:
        """Encode words in one text, separated by line ends."""
        ids = self._encode_words("\n".join(words))
        ends = [*np.flatnonzero(ids == self._line_end).tolist(), len(ids)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        content, size = ids.tobytes(), ids.itemsize
        return {word: content[start * size : end * size] for word, start, end in zip(words, starts, ends, strict=True)}
