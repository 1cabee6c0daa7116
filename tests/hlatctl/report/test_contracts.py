"""How a score was measured, from its contract; missing fields are unknown."""

from __future__ import annotations

from typing import Any

import pytest

from hlatctl.report.contracts import Conditions, agree, conditions_of_tasks, conditions_of_validation, of_mean


def _task(shots: int, items: int, **more: Any) -> dict[str, Any]:
    return {"shots": shots, "items": items, "datasets": {"test": "ab" * 32}, **more}


_TASKS = {"piqa": _task(0, 30), "mmlu_a": _task(5, 100), "mmlu_b": _task(5, 20)}


@pytest.mark.parametrize(
    ("names", "shots", "whole"),
    [(["piqa"], 0, True), (["mmlu_a"], 5, False), (["mmlu_a", "mmlu_b"], 5, False), (["piqa", "mmlu_b"], None, True)],
)
def test_a_score_has_the_conditions_of_its_tasks(names: list[str], shots: int | None, whole: bool) -> None:
    how = conditions_of_tasks({name: {**_TASKS[name], "limit": 40} for name in names})
    assert (how.shots, how.limit, how.whole, how.data is not None) == (shots, 40, whole, True)


def test_without_a_limit_all_items_are_used() -> None:
    assert conditions_of_tasks({"mmlu_a": {**_TASKS["mmlu_a"], "limit": None}}).whole is True


@pytest.mark.parametrize(
    ("how", "whole"),
    [({"limit": 0.5}, False), ({"limit": None, "chosen": [0, 3]}, False), ({"limit": 2, "chosen": [*range(30)]}, True)],
)
def test_a_fraction_and_chosen_items_are_a_part(how: dict[str, Any], whole: bool) -> None:
    assert conditions_of_tasks({"piqa": {**_TASKS["piqa"], **how}}).whole is whole


@pytest.mark.parametrize("tasks", [{}, {"mmlu_a": {}}])
def test_missing_fields_of_a_contract_are_unknown(tasks: dict[str, Any]) -> None:
    assert conditions_of_tasks(tasks) == Conditions()


def test_datasets_without_files_are_unknown() -> None:
    assert conditions_of_tasks({"piqa": _task(0, 30, datasets={})}).data is None


def test_held_out_text_has_its_own_hash_and_no_shots() -> None:
    assert conditions_of_validation({"sha256": "cd" * 32}) == Conditions(whole=True, data="cd" * 32)


def test_a_mean_has_only_the_conditions_that_its_parts_share() -> None:
    known = Conditions(shots=5, whole=True, data="a")
    assert of_mean([known]) == known
    both = of_mean([known, Conditions(shots=0, whole=False, data="b")])
    assert (both.shots, both.whole, both.data) == (None, False, of_mean([known, Conditions(data="b", whole=True)]).data)
    assert of_mean([known, Conditions()]) == Conditions()


@pytest.mark.parametrize(
    ("more", "is_equal"),
    [
        ({"generation": None}, True),
        ({"chat": {"template": True}}, False),
        ({"own": True}, False),
        ({"fewshot_seed": 0}, False),
        ({"generation": {"until": ["."]}}, False),
    ],
)
def test_scores_agree_only_if_versions_say_how_they_were_measured(more: dict[str, Any], is_equal: bool) -> None:
    task = _task(0, 30, limit=None, version="1.0", versions={"lm_eval": "0.4.13"})
    other = Conditions(shots=0, whole=True, definition="lm_eval 0.4.13, 1.0")
    assert agree(other, conditions_of_tasks({"piqa": {**task, **more}})) is is_equal
