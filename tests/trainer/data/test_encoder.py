"""Words apart or a document whole: the ids are the same, or the fast way is not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trainer.data import encoder, tokenizer
from trainer.data.encoder import make_encoder, splits_at_words

_TEXTS = [f"def function_{i}(argument):\n    return  argument + {i}  # naïve\n\n" for i in range(200)]
_ALPHABET = "ab \n\t\r▁é東🤖.x#<0A>/s"


@pytest.fixture(scope="session")
def sentencepiece_bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small model of the Llama kind."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text").write_text("".join(_TEXTS) + "ab  ab   x.x ###\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )
    tokenizer.prepare(folder / "m.model", folder / "out", texts=_TEXTS, train_vocab_size=0)
    return tokenizer.load(folder / "out" / "tokenizer.json")


def _whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _changed(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    description = json.loads(tokenizer.to_str())
    model = {key: changes.pop(key) for key in list(changes) if key in description["model"]}
    return {**description, **changes, "model": {**description["model"], **model}}


@given(texts=st.lists(st.text(st.sampled_from(_ALPHABET), max_size=60), max_size=8))
def test_separate_words_give_the_ids_of_the_whole(sentencepiece_bpe: Tokenizer, texts: list[str]) -> None:
    encode = make_encoder(sentencepiece_bpe)
    for text in [*texts, *texts]:  # the second time from memory
        ids = encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == _whole(sentencepiece_bpe, text)


def test_the_fast_way_is_used_if_it_is_proved(sentencepiece_bpe: Tokenizer) -> None:
    assert splits_at_words(json.loads(sentencepiece_bpe.to_str()))


def test_the_fast_way_is_not_used_if_it_is_not_proved(sentencepiece_bpe: Tokenizer, tmp_path: Path) -> None:
    vocabulary = json.loads(sentencepiece_bpe.to_str())["model"]["vocab"]
    unproved: list[dict[str, Any]] = [
        {"normalizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"dropout": 0.1},
        {"byte_fallback": False},
        {"ignore_merges": True},
        {"vocab": {**vocabulary, "a▁b": 999}},
        {"vocab": {**vocabulary, ".\n": 999}},
        {"vocab": {piece: i for piece, i in vocabulary.items() if piece != "<0x0A>"}},
        {"added_tokens": [{"content": "a b", "special": False}]},
    ]
    assert [splits_at_words(_changed(sentencepiece_bpe, **change)) for change in unproved] == [False] * len(unproved)
    tokenizer.prepare(None, tmp_path / "byte_level", texts=_TEXTS, train_vocab_size=300)
    byte_level = tokenizer.load(tmp_path / "byte_level" / "tokenizer.json")
    assert not splits_at_words(json.loads(byte_level.to_str()))
    assert make_encoder(byte_level)(_TEXTS[0]).tolist() == _whole(byte_level, _TEXTS[0])


def test_cache_is_bounded_and_eviction_changes_nothing(
    sentencepiece_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_REMEMBERED_WORDS", 20)
    encode: Any = make_encoder(sentencepiece_bpe)
    texts = [f"word{i} again and\nagain {'long' * 30} {i % 3}" for i in range(100)]
    for text in texts:
        assert encode(text).tolist() == _whole(sentencepiece_bpe, text)
        assert len(encode._known) + len(encode._before) <= 2 * 30
        assert max(map(len, encode._known), default=0) <= encoder._REMEMBERED_CHARACTERS


def test_llama_ids_of_books_are_those_of_the_whole(shared_data: Path, tmp_path: Path) -> None:
    tokenizer.prepare(
        shared_data / "tokenizers" / "llama2-tokenizer.model", tmp_path / "t", texts=[], train_vocab_size=0
    )
    llama = tokenizer.load(tmp_path / "t" / "tokenizer.json")
    assert splits_at_words(json.loads(llama.to_str()))
    assert splits_at_words(json.loads((shared_data / "tokenizers" / "llama2-tokenizer.json").read_text()))
    encode = make_encoder(llama)
    for text in pq.read_table(shared_data / "corpora" / "books-valid.parquet", columns=["text"])["text"].to_pylist():
        assert encode(text).tolist() == _whole(llama, text)
