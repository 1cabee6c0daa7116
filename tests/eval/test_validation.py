"""Held-out loss, compared with known values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import validation
from eval.serving.model import Loaded
from hlatctl.run.errors import DataError


def _write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _uniform(loaded: Loaded) -> Loaded:
    """Return the model with an output layer of zeros: every token is equally likely."""
    import copy

    model = copy.deepcopy(loaded.model)
    torch.nn.init.zeros_(model.lm_head.weight)
    return replace(loaded, model=model)


def test_documents_are_joined_by_the_end_of_sequence_token(loaded: Loaded, tmp_path: Path) -> None:
    path = _write(tmp_path / "v.jsonl", "one", "two")
    one, two = (loaded.tokenizer.encode(text) for text in ("one", "two"))
    held_out = validation.tokenize(loaded.tokenizer, path, max_tokens=1000)
    assert held_out.ids == [1, *one, 1, *two, 1]
    assert held_out.text_bytes == 6


def test_a_uniform_model_has_the_loss_of_its_vocabulary(loaded: Loaded, held_out: Path) -> None:
    scores = validation.evaluate(_uniform(loaded), held_out, max_tokens=600)
    assert scores["validation_loss"].value == pytest.approx(math.log(400), rel=1e-5)
    assert scores["validation_perplexity"].value == pytest.approx(400, rel=1e-4)
    assert scores["validation_loss"].n == 600


def test_bits_per_byte_count_utf8_bytes_of_the_text(loaded: Loaded, tmp_path: Path) -> None:
    text = "žluťoučký kůň 🐎"
    path = _write(tmp_path / "v.jsonl", text)
    scores = validation.evaluate(_uniform(loaded), path, max_tokens=1000)
    tokens = len(loaded.tokenizer.encode(text)) + 1
    expected = tokens * math.log2(400) / len(text.encode("utf-8"))
    assert scores["validation_bits_per_byte"].value == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_that_of_transformers(loaded: Loaded, tmp_path: Path) -> None:
    """On a text of one window, the model's own loss must be the same number."""
    path = _write(tmp_path / "v.jsonl", "The quick brown fox jumps over the lazy dog.")
    ids = validation.tokenize(loaded.tokenizer, path, max_tokens=1000).ids
    with torch.inference_mode():
        expected = loaded.model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    scores = validation.evaluate(loaded, path, max_tokens=1000)["validation_loss"]
    assert scores.value == pytest.approx(expected, rel=1e-6)
    assert scores.stderr is None


def test_every_token_is_predicted_once_with_any_batch_size(
    loaded: Loaded, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(loaded, max_length=64)
    one = validation.evaluate(short, held_out, max_tokens=700)["validation_loss"]
    monkeypatch.setattr(validation, "_LOGITS_BYTES", 1)
    other = validation.evaluate(short, held_out, max_tokens=700)["validation_loss"]
    assert one.n == other.n == 700
    assert one.value == pytest.approx(other.value, rel=1e-6)


def test_the_standard_error_is_taken_over_windows() -> None:
    assert validation._ratio_stderr([20.0, 30.0, 40.0], [10, 10, 10]) == pytest.approx(1.0 / math.sqrt(3))
    assert validation._ratio_stderr([20.0], [10]) is None


def test_the_errors_of_perplexity_and_bits_follow_that_of_the_loss(loaded: Loaded, held_out: Path) -> None:
    scores = validation.evaluate(replace(loaded, max_length=64), held_out, max_tokens=600)
    loss, perplexity, bits = (scores[f"validation_{name}"] for name in ("loss", "perplexity", "bits_per_byte"))
    assert loss.stderr is not None
    assert perplexity.stderr is not None
    assert bits.stderr is not None
    assert perplexity.stderr / perplexity.value == pytest.approx(loss.stderr)
    assert bits.stderr / bits.value == pytest.approx(loss.stderr / loss.value)


@pytest.mark.parametrize("max_tokens", [1, 7, 100])
def test_no_more_than_the_tokens_asked_for_are_scored(loaded: Loaded, held_out: Path, max_tokens: int) -> None:
    assert validation.evaluate(loaded, held_out, max_tokens=max_tokens)["validation_loss"].n == max_tokens


def test_the_bytes_of_a_cut_document_are_those_of_its_kept_tokens(loaded: Loaded, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    path = _write(tmp_path / "v.jsonl", text)
    ids = loaded.tokenizer.encode(text)
    held_out = validation.tokenize(loaded.tokenizer, path, max_tokens=4)
    assert held_out.ids == [1, *ids[:4]]
    assert held_out.text_bytes == len(loaded.tokenizer.decode(ids[:4]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no text to validate on"),
        ('{"text": ""}\n', "has no text to validate on"),
        ('{"text": "a"}\n{"other": 1}\n', "line 2 is not a JSON object with a field text"),
        ("no json\n", "line 1 is not a JSON object with a field text"),
    ],
)
def test_a_damaged_held_out_text_is_refused(loaded: Loaded, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        validation.evaluate(loaded, path, max_tokens=10)


def test_a_held_out_line_without_an_end_is_refused(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_MAX_LINE_BYTES", 100)
    path = _write(tmp_path / "v.jsonl", "x" * 1000)
    with pytest.raises(DataError, match=r"line 1 has 1,0\d\d bytes, the limit is 100"):
        validation.evaluate(loaded, path, max_tokens=10)


def test_a_missing_held_out_text_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="held-out text can't be read"):
        validation.evaluate(loaded, tmp_path / "none.jsonl", max_tokens=10)


def test_a_tokenizer_without_an_end_of_sequence_token_is_refused(held_out: Path) -> None:
    class NoEnd:
        eos_token_id: Any = None

    with pytest.raises(DataError, match="the tokenizer has no end-of-sequence token"):
        validation.tokenize(NoEnd(), held_out, max_tokens=10)
