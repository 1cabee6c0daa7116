from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hlatctl.run.errors import DataError
from trainer.data import tokenizer

_TEXTS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(200)]


def _prepare(path: Path | None, folder: Path) -> dict[str, object]:
    tokenizer.prepare(path, folder, texts=iter(_TEXTS), train_vocab_size=300)
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

    (tmp_path / "text").write_text("".join(_TEXTS))
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
    _assert_equal_ids(tmp_path / "m.model", tmp_path / "out", [*_TEXTS, "unseen ünïcödé 東京"])


def test_llama_ids_equal_sentencepiece_on_books(shared_data: Path, tmp_path: Path) -> None:
    model = shared_data / "tokenizers" / "llama2-tokenizer.model"
    table = pq.read_table(shared_data / "corpora" / "books-valid.parquet", columns=["text"])
    tokenizer.prepare(model, tmp_path / "out", texts=[], train_vocab_size=0)
    _assert_equal_ids(model, tmp_path / "out", table["text"].to_pylist()[:40])


def _assert_equal_ids(model: Path, folder: Path, texts: list[str]) -> None:
    from sentencepiece import SentencePieceProcessor

    reference, ours = SentencePieceProcessor(model_file=str(model)), tokenizer.load(folder / "tokenizer.json")
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).ids == reference.encode(text)


def test_gpt_neox_folder_is_used_unchanged(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "tokenizers" / "gpt-neox-20b"
    described = _prepare(source, tmp_path / "out")
    assert described["eos_id"] == described["bos_id"] == 0
    shutil.copyfile(source / "tokenizer.json", tmp_path / "tokenizer.json")
    assert _prepare(tmp_path / "tokenizer.json", tmp_path / "again")["eos_id"] == 0
