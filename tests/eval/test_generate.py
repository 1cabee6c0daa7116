"""The lines that the process reads and answers, without the process."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conf.sampling import Sampling
from eval import generate
from eval.generate import _Answers
from eval.serving import model
from hlatctl.run.errors import EvaluationError


def _first(folder: Path, **keys: Any) -> dict[str, Any]:
    usual = {"context_tokens": None, "device": "cpu", "needs_device": False, "after_document": False}
    return {"model": str(folder), **usual, **keys}


def test_each_line_is_answered_by_lines(model_folder: Path) -> None:
    output = io.StringIO()
    answers = _Answers(output)
    answers.load(_first(model_folder, context_tokens=32))
    asked = {"sampling": dataclasses.asdict(Sampling(temperature=0, max_new_tokens=5))}
    answers.answer({"prompt": "The quick", **asked})
    answers.answer({"prompt": "", **asked})
    answers.answer({"prompt": "<s>" * 32, **asked})
    ready, *pieces, refused = [json.loads(line) for line in output.getvalue().splitlines()]
    assert ready["ready"]["context_tokens"] == 32
    assert ready["ready"]["device"] == "cpu"
    first, second = [answer["end"] for answer in pieces if "end" in answer]
    assert first["text"] + second["text"] == "".join(answer["text"] for answer in pieces if "text" in answer)
    assert (len(first["token_ids"]), second["prompt_tokens"]) == (5, 1)
    assert refused == {
        "refused": "prompt: has 32 tokens; it must have fewer than the model's context, 32 tokens",
        "hint": "shorten the prompt",
    }


def test_a_missing_device_is_refused_only_if_it_was_asked_for(model_folder: Path) -> None:
    output = io.StringIO()
    with pytest.raises(EvaluationError, match="--device=neuron: PyTorch finds no such device here"):
        _Answers(output).load(_first(model_folder, device="neuron", needs_device=True))
    _Answers(output).load(_first(model_folder, device="neuron"))
    assert json.loads(output.getvalue())["ready"]["device"] == "cpu"


def test_damaged_weights_are_an_error(model_folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model_folder, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EvaluationError, match="can't be loaded"):
        _Answers(io.StringIO()).load(_first(broken))


_GREEDY = Sampling(temperature=0, max_new_tokens=40)


def _generate(loaded: model.Loaded, prompt: str, sampling: Sampling = _GREEDY, **keys: Any) -> generate.Text:
    return generate.generate(loaded, generate.encode(loaded, prompt, after_document=True), sampling, **keys)


@contextmanager
def _ends_with(loaded: model.Loaded, token: int) -> Iterator[None]:
    """Name a token that ends texts in the model's own generation configuration."""
    usual = loaded.model.generation_config.eos_token_id
    loaded.model.generation_config.eos_token_id = [token]
    yield
    loaded.model.generation_config.eos_token_id = usual


def test_the_greedy_text_takes_the_likeliest_token_each_time(loaded: model.Loaded) -> None:
    import torch

    ids = generate.encode(loaded, "The quick", after_document=True)
    assert ids[0] == loaded.tokenizer.eos_token_id, "as before every document in training"
    expected = list(ids)
    with torch.inference_mode():
        for _ in range(8):
            expected.append(int(loaded.model(torch.tensor([expected])).logits[0, -1].argmax()))
    text = _generate(loaded, "The quick", Sampling(temperature=0, max_new_tokens=8))
    assert text.token_ids == expected[len(ids) :]
    assert (text.prompt_tokens, text.stop) == (len(ids), "max_new_tokens")


def test_pieces_are_the_text_and_no_character_is_cut(loaded: model.Loaded) -> None:
    """The model is random, so its bytes are seldom valid UTF-8."""
    pieces: list[str] = []
    text = _generate(loaded, "é", Sampling(seed=3, max_new_tokens=200), write=pieces.append)
    assert "".join(pieces) == text.text
    assert text.text == loaded.tokenizer.decode(text.token_ids, skip_special_tokens=True)
    assert len(pieces) > 50


def test_a_character_of_several_tokens_comes_in_one_piece(loaded: model.Loaded) -> None:
    import torch

    written: list[str] = []
    ids = loaded.tokenizer.encode("aé€ b", add_special_tokens=False)
    assert len(ids) > len("aé€ b"), "bytes of the characters are tokens of their own"
    pieces = generate._Pieces(loaded.tokenizer, [5, 6], written.append)
    pieces.put(torch.tensor([[5, 6]]))
    for token in ids:
        pieces.put(torch.tensor([token]))
    pieces.end()
    assert {"é", "€"} <= set(written)
    assert pieces.text == "aé€ b"


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(loaded: model.Loaded) -> None:
    with pytest.raises(EvaluationError, match=r"prompt: has 301 tokens; .* the model's context, 256 tokens"):
        generate.encode(loaded, "<s>" * 300, after_document=True)


def test_a_text_ends_with_the_context(loaded: model.Loaded) -> None:
    prompt = "<s>" * 250
    text = _generate(loaded, prompt)
    assert (text.prompt_tokens, len(text.token_ids), text.stop) == (251, 5, "context_full")


def test_a_text_ends_with_the_document(loaded: model.Loaded) -> None:
    third = _generate(loaded, "The quick").token_ids[2]
    with _ends_with(loaded, third):
        text = _generate(loaded, "The quick")
    assert (text.token_ids[-1], text.stop) == (third, "end_of_document")
    assert len(text.token_ids) <= 3


def test_a_text_can_be_stopped(loaded: model.Loaded) -> None:
    pieces: list[str] = []
    text = _generate(loaded, "The quick", write=pieces.append, is_stopped=lambda: len(pieces) == 3)
    assert text.stop == "stopped"
    assert len(pieces) <= 4


def test_a_seed_repeats_a_text_and_another_one_does_not(loaded: model.Loaded) -> None:
    first, again, other = (_generate(loaded, "The", Sampling(seed=seed)).token_ids for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_one_likeliest_token_is_the_greedy_text_whatever_the_folder_s_defaults_are(loaded: model.Loaded) -> None:
    usual = loaded.model.generation_config
    usual.repetition_penalty = 50.0
    try:
        drawn = _generate(loaded, "The quick", Sampling(top_k=1, temperature=5, max_new_tokens=40))
        assert loaded.model.generation_config is usual
    finally:
        usual.repetition_penalty = None
    assert drawn.token_ids == _generate(loaded, "The quick").token_ids


def test_weights_that_are_not_finite_are_an_error(model_folder: Path) -> None:
    broken = model.load(model_folder, seq_len=256, device="cpu")
    broken.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(EvaluationError, match="can't generate a text"):
        _generate(broken, "The", Sampling())
