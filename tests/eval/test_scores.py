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


def test_results_are_read_back_only_for_their_step_weights_and_contract(tmp_path: Path) -> None:
    path, own = tmp_path / "results.json", {"contract": "c", "step": 3, "weights": "w"}
    record = scores.write_results(path, identity=own, wall_s=1.5)
    assert scores.read_results(path, identity=own) == record
    assert scores.read_results(tmp_path / "none.json", identity=own) is None
    for other in ({"contract": "d"}, {"step": 4}, {"weights": "v"}):
        assert scores.read_results(path, identity={**own, **other}) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', '{"v": 2, "contract": "c", "sha256": "00"}'])
def test_a_damaged_results_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(scores.DamagedResultsError, match=r"results\.json: can't be used \("):
        scores.read_results(path, identity={"contract": "c"})
