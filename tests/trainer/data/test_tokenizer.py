"""The tokenizer: the fast way gives the ids of a whole document or is not taken; ids are decoded to the same text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hlatctl.run.errors import DataError
from trainer.data import tokenizer
from trainer.data import tokenizer as encoder
from trainer.data.tokenizer import decoder, make_encoder, splits_at_words

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


def test_llama_ids_of_books_are_those_of_the_whole(real_data: Path, tmp_path: Path) -> None:
    tokenizer.prepare(real_data / "tokenizers" / "llama2-tokenizer.model", tmp_path / "t", texts=[], train_vocab_size=0)
    llama = tokenizer.load(tmp_path / "t" / "tokenizer.json")
    assert splits_at_words(json.loads(llama.to_str()))
    assert splits_at_words(json.loads((real_data / "tokenizers" / "llama2-tokenizer.json").read_text()))
    encode = make_encoder(llama)
    for text in pq.read_table(real_data / "corpora" / "books-valid.parquet", columns=["text"])["text"].to_pylist():
        assert encode(text).tolist() == _whole(llama, text)


_TEXT = "Naïve “words” 日本 \n\t x = 1  # 🙂"


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer


def test_byte_level_ids_become_their_bytes() -> None:
    tokenizer = _byte_level()
    ids = tokenizer.encode(_TEXT).ids
    decode = decoder(tokenizer, 310)
    assert decode(ids).decode() == _TEXT
    eos = tokenizer.get_vocab()["</s>"]
    assert eos is not None
    assert decode([*ids, eos, *ids, 305]).decode() == f"{_TEXT} {_TEXT}"


def test_sentencepieces_ids_become_spaces_and_bytes(real_data: Path) -> None:
    from trainer.data.tokenizer import convert

    model = next(iter(sorted((real_data / "tokenizers").rglob("*.model"))), None)
    if model is None:
        pytest.skip("no SentencePiece model beside this checkout")
    tokenizer = convert(model, ())
    ids = tokenizer.encode(_TEXT, add_special_tokens=False).ids
    text = decoder(tokenizer, tokenizer.get_vocab_size())(ids).decode()
    assert text.strip() == _TEXT == tokenizer.decode(ids).strip()


def test_other_tokenizers_decode_themselves() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, "world": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert decoder(tokenizer, 4)([1, 2, 3]) == b"hello world"


def test_a_byte_level_token_outside_of_its_alphabet_is_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"日": 0, "a": 1}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    assert decoder(tokenizer, 2)([0, 1]).decode() == "日a"


_TOKENIZER_TEXTS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(200)]


def _prepare(path: Path | None, folder: Path) -> dict[str, object]:
    tokenizer.prepare(path, folder, texts=iter(_TOKENIZER_TEXTS), train_vocab_size=300)
    return tokenizer.describe(folder)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    _prepare(None, tmp_path / "trained")
    return tmp_path / "trained"


def test_trained_tokenizer_gives_any_text_back(trained: Path) -> None:
    from transformers import AutoTokenizer

    described = tokenizer.describe(trained)
    assert (described["vocab_size"], described["bos_id"], described["eos_id"]) == (300, 0, 1)
    loaded = AutoTokenizer.from_pretrained(trained)
    for text in ("def f(x):\n\treturn  x", "zwölf 東京 🤖\r\n", " leading and trailing "):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 1)


def test_folder_and_tokenizer_json_keep_their_ids(trained: Path, tmp_path: Path) -> None:
    (trained / "config.json").write_text('{"model_type": "not the tokenizer\'s"}')
    from_folder = _prepare(trained, tmp_path / "folder")
    from_json = _prepare(trained / "tokenizer.json", tmp_path / "json")
    assert from_folder == from_json == tokenizer.describe(trained)
    assert not (tmp_path / "folder" / "config.json").exists()


def test_special_tokens_in_a_text_are_encoded_as_text(trained: Path) -> None:
    loaded = tokenizer.load(trained / "tokenizer.json")
    ids = loaded.encode("a </s> in a document", add_special_tokens=False).ids
    assert 1 not in ids


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent: no such file or folder"),
        ("folder", r"folder: the folder has no tokenizer\.json"),
        ("vocab.txt", r"vocab\.txt: unknown kind of tokenizer"),
    ],
)
def test_path_that_is_not_a_tokenizer_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(DataError, match=rf"tokenizer\.path=.*{message}") as caught:
        tokenizer.kind_of(tmp_path / name)
    assert "SentencePiece .model file" in caught.value.hint


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(DataError, match=r"tokenizer\.json: not a readable tokenizer"):
        _prepare(tmp_path / "tokenizer.json", tmp_path / "a")
    (tmp_path / "bad.model").write_bytes(b"\xff\xfe no protocol buffer")
    with pytest.raises(DataError, match=r"bad\.model: not a SentencePiece model"):
        _prepare(tmp_path / "bad.model", tmp_path / "b")


def test_vocabulary_without_an_end_is_refused(trained: Path) -> None:
    config = json.loads((trained / "tokenizer_config.json").read_text())
    (trained / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<nothing>"}))
    with pytest.raises(DataError, match="eos_token='<nothing>' is not in the vocabulary"):
        tokenizer.describe(trained)


@pytest.mark.parametrize(("model_type", "vocab_size"), [("bpe", 300), ("unigram", 400)])
def test_trained_sentencepiece_models_convert_with_equal_ids(tmp_path: Path, model_type: str, vocab_size: int) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("".join(_TOKENIZER_TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=vocab_size,
        model_type=model_type,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    assert _prepare(tmp_path / "m.model", tmp_path / "out")["eos_id"] == 2
    _assert_equal_ids(tmp_path / "m.model", tmp_path / "out", [*_TOKENIZER_TEXTS, "unseen ünïcödé 東京"])


def test_llama_ids_equal_sentencepiece_on_books(real_data: Path, tmp_path: Path) -> None:
    model = real_data / "tokenizers" / "llama2-tokenizer.model"
    table = pq.read_table(real_data / "corpora" / "books-valid.parquet", columns=["text"])
    tokenizer.prepare(model, tmp_path / "out", texts=[], train_vocab_size=0)
    _assert_equal_ids(model, tmp_path / "out", table["text"].to_pylist()[:40])


def _assert_equal_ids(model: Path, folder: Path, texts: list[str]) -> None:
    from sentencepiece import SentencePieceProcessor

    reference, ours = SentencePieceProcessor(model_file=str(model)), tokenizer.load(folder / "tokenizer.json")
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).ids == reference.encode(text)


def test_gpt_neox_folder_is_used_unchanged(real_data: Path, tmp_path: Path) -> None:
    source = real_data / "tokenizers" / "gpt-neox-20b"
    described = _prepare(source, tmp_path / "out")
    assert described["eos_id"] == described["bos_id"] == 0
    shutil.copyfile(source / "tokenizer.json", tmp_path / "tokenizer.json")
    assert _prepare(tmp_path / "tokenizer.json", tmp_path / "again")["eos_id"] == 0
