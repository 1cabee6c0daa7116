"""A text to its ids, exactly as the tokenizer gives them, but faster where that can be proved. No files, no packing.

SentencePiece-style BPE takes a whole document for one word, so nothing is ever looked up twice. Yet where no piece of
the vocabulary holds a space after another character, and none a line end, no merge ever crosses such a place: the words
between can be encoded one by one with equal ids, and kept. Text repeats its words, so most are then found, not encoded.
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
#: A text to its ids, without special tokens.
Encode = Callable[[str], Tokens]

_SPACE = "▁"
_WORD = re.compile(r" *[^ \n]+| +|\n")
_LINE_END_PIECE = "<0x0A>"
#: Words in a generation, about 25 MB; the one before is kept too, so that what comes often is never forgotten.
_REMEMBERED_WORDS = 100_000
#: Longer ones are no words and hardly come again.
_REMEMBERED_CHARACTERS = 64
_UNKNOWN = b"?"  # no ids: these come in fours


def make_encoder(tokenizer: Tokenizer) -> Encode:
    """The fastest exact way to encode with a tokenizer, which it may change.

    Args:
        tokenizer: as :func:`trainer.data.tokenizer.load` gives it.
    """
    whole = _Whole(tokenizer)
    return _ByWord(tokenizer, whole) if splits_at_words(json.loads(tokenizer.to_str())) else whole


def splits_at_words(description: dict[str, Any]) -> bool:
    """Whether words can be encoded apart: proved from the parts of a ``tokenizer.json``, or else False."""
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
    """A space before the text, and every space made visible: what SentencePiece does and no more."""
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return normalizer == {"type": "Sequence", "normalizers": [prepend, replace]}


class _Whole:
    """One call of the tokenizer a text; it lets other threads run meanwhile."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Tokens:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)


class _ByWord:
    """Word by word, from memory; what is new is encoded in one call."""

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
        found = [known.get(word, _UNKNOWN) for word in words]
        if missing := [place for place, ids in enumerate(found) if ids is _UNKNOWN]:
            recalled = self._recall({words[place] for place in missing})
            for place in missing:
                found[place] = recalled[words[place]]
            self._remember(recalled)
        return np.frombuffer(b"".join(found), dtype=np.int32)

    def _remember(self, recalled: dict[str, bytes]) -> None:
        self._known.update((word, ids) for word, ids in recalled.items() if len(word) <= _REMEMBERED_CHARACTERS)
        if len(self._known) > _REMEMBERED_WORDS:
            self._known, self._before = {}, self._known

    def _recall(self, new: set[str]) -> dict[str, bytes]:
        """The ids of words, as bytes: from the generation of words before this one, or encoded."""
        found = {word: self._before[word] for word in new if word in self._before}
        found["\n"] = self._line_end.tobytes()
        unknown = [word for word in new if word not in found]
        return found | self._learn(unknown) if unknown else found

    def _learn(self, words: list[str]) -> dict[str, bytes]:
        """Encode words, in one text where line ends part them."""
        ids = self._encode_words("\n".join(words))
        ends = [*np.flatnonzero(ids == self._line_end).tolist(), len(ids)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        content, size = ids.tobytes(), ids.itemsize
        return {word: content[start * size : end * size] for word, start, end in zip(words, starts, ends, strict=True)}
