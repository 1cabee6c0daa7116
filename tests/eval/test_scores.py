from __future__ import annotations

import math
from pathlib import Path

import pytest

from eval import scores
from eval.scores import Score
from hlatctl.run.errors import EvaluationError


def test_a_score_that_is_no_number_is_refused() -> None:
    broken = {"validation_loss": Score(metric="loss_nats_per_token", value=math.nan, stderr=None, n=10)}
    with pytest.raises(EvaluationError, match="validation_loss: loss_nats_per_token is nan, so the model's weights"):
        scores.check_finite(broken)


def test_the_contract_changes_with_settings_and_items_and_with_nothing_else(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("one", encoding="utf-8")
    first = scores.contract({"limit": 1, "suite": "smoke"}, {"items": items})
    assert scores.contract({"suite": "smoke", "limit": 1}, {"items": items}) == first
    assert scores.contract({"limit": 2, "suite": "smoke"}, {"items": items}) != first
    items.write_text("two", encoding="utf-8")
    assert scores.contract({"limit": 1, "suite": "smoke"}, {"items": items}) != first


def test_results_are_read_back_only_for_their_step_and_contract(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    record = scores.write_results(path, contract="c", step=3, wall_s=1.5)
    assert scores.read_results(path, contract="c", step=3) == record
    assert scores.read_results(path, contract="other", step=3) is None
    assert scores.read_results(path, contract="c", step=4) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"v": 1}', '"text"'])
def test_a_damaged_results_file_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content, encoding="utf-8")
    assert scores.read_results(path, contract="c", step=3) is None
