"""One schema for ranked choices, written answers and programs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from eval import scores
from eval.scores import Score
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import COLUMNS


def sample(number: int, arguments: list[Any], given: list[Any], **metrics: Any) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": {"question": "ü?"},
        "target": 1,
        "arguments": arguments,
        "filtered_resps": given,
        "filter": "none",
        "metrics": list(metrics),
        **metrics,
    }


def written(tmp_path: Path, *samples: dict[str, Any]) -> list[dict[str, Any]]:
    scores.write_items(tmp_path / "new" / "items-t.parquet", "t", samples)
    table = parquet.read_table(tmp_path / "new" / "items-t.parquet")
    assert table.column_names == list(COLUMNS)
    return [dict(row) for row in table.to_pylist()]


def test_ranked_choices_have_their_log_likelihoods(tmp_path: Path) -> None:
    ranked = sample(3, [("Q: ", " a"), ("Q: ", " b")], [(-1.5, True), (-2.5, False)], acc=1.0, odd=[1, 2])
    (row,) = written(tmp_path, ranked)
    assert (row["task"], row["item"], row["prompt"], row["target"]) == ("t", "3", "Q: ", "1")
    assert (row["choices"], row["loglikelihoods"], row["answer"]) == ([" a", " b"], [-1.5, -2.5], "")
    assert row["metrics"] == [("acc", 1.0)], "only numbers"
    assert row["document"] == '{"question": "ü?"}'


def test_written_answers_have_their_text(tmp_path: Path) -> None:
    (row,) = written(tmp_path, sample(0, [("Q: ", {"until": ["\n"]})], ["42"], exact_match=0.0))
    assert (row["choices"], row["answer"], row["metrics"]) == ([], "42", [("exact_match", 0.0)])


def test_programs_have_what_became_of_them(tmp_path: Path) -> None:
    program = {"task_id": "p/1", "completion": "return 1", "prompt": "def f():", "passed": True, "result": "passed"}
    (row,) = written(tmp_path, program)
    assert (row["item"], row["prompt"], row["answer"], row["result"]) == ("p/1", "def f():", "return 1", "passed")
    assert row["metrics"] == [("passed", 1.0)]


def test_a_task_without_items_has_the_same_columns(tmp_path: Path) -> None:
    assert written(tmp_path) == []


def test_the_same_items_are_the_same_bytes(tmp_path: Path) -> None:
    one = sample(0, [("Q", {"until": []})], ["x"], acc=0.0)
    for name in ("a", "b"):
        scores.write_items(tmp_path / name, "t", [one, one])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


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
