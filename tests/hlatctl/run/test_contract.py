"""The contracts of a run: what is recorded, what is refused, and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import contract
from hlatctl.run.errors import EvaluationError
from hlatctl.run.paths import RunPaths

_FIRST: dict[str, Any] = {
    "versions": {"lm_eval": "0.4.13"},
    "limit": None,
    "tasks": {"piqa": {"shots": 0, "prompts": "ab" * 32}},
    "validation": {"sha256": "1"},
}


def _changed(**fields: Any) -> dict[str, Any]:
    return {**_FIRST, **fields}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def test_the_first_contract_is_recorded_and_known_ever_after(run: RunPaths) -> None:
    assert contract.recorded(run) == []
    assert contract.own(run) == ""
    assert [contract.admit(run, _FIRST), contract.admit(run, dict(_FIRST))] == [0, 0]
    assert contract.recorded(run) == [_FIRST]
    assert contract.own(run) == contract.of_tasks(_FIRST)


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (_changed(versions={"lm_eval": "0.4.14"}), 'versions.lm_eval was "0.4.13" when .* and is "0.4.14" now'),
        (_changed(limit=10), "limit was null when .* and is 10 now"),
        (
            _changed(tasks={"piqa": {"shots": 0, "prompts": "cd" * 32}}),
            "tasks.piqa.prompts was abababababababab when .* and is cdcdcdcdcdcdcdcd now",
        ),
        (_changed(tasks={}), "tasks.piqa was recorded when .* and is not recorded now"),
        (_changed(code={"timeout_s": 3.0}), "code.timeout_s was not recorded when .* and is 3.0 now"),
        (_changed(environment={}), "environment was not recorded when .* and is recorded now"),
        (_changed(validation={"sha256": "2"}), 'validation.sha256 was "1" when .* and is "2" now'),
    ],
)
def test_another_contract_is_refused_with_its_first_difference(
    run: RunPaths, present: dict[str, Any], words: str
) -> None:
    contract.admit(run, _FIRST)
    for ask in (contract.admit, contract.check):
        with pytest.raises(EvaluationError, match=rf"contract\.json: {words}") as caught:
            ask(run, present)
    assert caught.value.hint.endswith(
        "`hlatctl eval run --new-contract`, with the same OVERRIDES, keeps the scores of both apart"
    )
    assert caught.value.hint.startswith("put it back") == ("was not recorded" not in words)
    assert contract.recorded(run) == [_FIRST]


def test_another_contract_is_accepted_on_request_and_then_recorded(run: RunPaths) -> None:
    other = _changed(limit=10)
    contract.admit(run, _FIRST)
    assert contract.check(run, other, new=True) == 1
    assert contract.recorded(run) == [_FIRST], "a check records nothing"
    assert [contract.admit(run, other, new=True), contract.admit(run, other), contract.admit(run, _FIRST)] == [1, 1, 0]
    assert contract.own(run) == contract.of_tasks(_FIRST)
    assert contract.results_folder(_FIRST, 0) == ""
    assert contract.results_folder(other, 1) == f"contract-{contract.digest(other)[:12]}"


def test_a_contract_of_an_older_release_is_refused_for_its_missing_fields_and_accepted_on_request(
    run: RunPaths,
) -> None:
    later = {"versions": {"lm_eval": "0.4.13"}, "source": {"lm_eval": "ab" * 32}, **_changed(limit=10)}
    contract.admit(run, _FIRST)
    with pytest.raises(EvaluationError, match=r"source\.lm_eval was not recorded when .* and is abababababababab now"):
        contract.admit(run, later)
    assert [contract.admit(run, later, new=True), contract.admit(run, later), contract.admit(run, _FIRST)] == [1, 1, 0]
    with pytest.raises(
        EvaluationError, match=r"source\.lm_eval was abababababababab when .* and is cdcdcdcdcdcdcdcd now"
    ):
        contract.admit(run, {**later, "source": {"lm_eval": "cd" * 32}})


def test_a_refusal_compares_with_the_contract_of_the_same_tasks(run: RunPaths) -> None:
    contract.admit(run, _FIRST)
    contract.admit(run, _changed(tasks={"boolq": {"shots": 0}}), new=True)
    with pytest.raises(EvaluationError, match=r"tasks\.boolq\.shots was 0 when .* and is 5 now"):
        contract.admit(run, _changed(tasks={"boolq": {"shots": 5}}))


def test_the_held_out_text_changes_only_the_contract_of_its_own_scores() -> None:
    other = _changed(validation={"sha256": "2"})
    assert contract.of_tasks(other) == contract.of_tasks(_FIRST)
    assert contract.of_validation(other) != contract.of_validation(_FIRST)


@pytest.mark.parametrize("content", ["", "[]", '{"v": 7, "contracts": []}', '{"contracts": 3}'])
def test_a_damaged_record_is_refused_rather_than_replaced(run: RunPaths, content: str) -> None:
    run.evals.mkdir(parents=True)
    run.contract.write_text(content, encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"contract\.json: can't be read \(.*\), so the contract"):
        contract.admit(run, _FIRST)
    assert run.contract.read_text(encoding="utf-8") == content


def test_a_changed_digit_in_the_record_is_noticed(run: RunPaths) -> None:
    contract.admit(run, _FIRST)
    text = run.contract.read_text(encoding="utf-8")
    run.contract.write_text(text.replace("0.4.13", "0.4.14"), encoding="utf-8")
    with pytest.raises(EvaluationError, match="is not as it was written"):
        contract.recorded(run)
