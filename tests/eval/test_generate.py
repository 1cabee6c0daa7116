"""The lines that the process reads and answers, without the process."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conf.sampling import Sampling
from eval.generate import _Answers
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
