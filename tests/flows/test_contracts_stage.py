"""The contracts of an evaluation: what is asked, and that an external model's are asked for once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from flows import evaluate
from flows.stages import evaluate as contracts
from hlatctl.run.fold import read_state


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The words with which the evaluator was asked."""
    calls: list[tuple[str, ...]] = []

    def answer(module: str, config: object, *words: str, **options: Any) -> str:
        calls.append(words)
        return json.dumps({"contract": "ab", "contracts": {"10": {"b": "2"}, "2": {"a": "1"}}})

    monkeypatch.setattr(contracts, "ask_about", answer)
    return calls


def test_a_new_external_model_is_asked_about_once(tmp_path: Path, asked: list[tuple[str, ...]]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 77}', encoding="utf-8")
    config = compose([f"runs_dir={tmp_path / 'runs'}"])
    run, known = evaluate.create(config, folder, argv=[])
    assert asked == [("--model", str(folder))]
    assert list(known.contracts) == ["2", "10"]
    request = evaluate.of_run(run, config, read_state(run), asked=known)
    assert evaluate.contracts_of(request) == known
    assert len(asked) == 1
    again = evaluate.contracts_of(evaluate.of_run(run, config, read_state(run), new_contract=True))
    assert asked[1:] == [("--run-dir", str(run.root), "--new-contract", "--model", str(folder))]
    assert again.new_contract
