"""The contracts of a run: what is recorded, what is refused, and how they are compared field by field."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import contract
from hlatctl.run.contract import Contracts, Record, admit, check_record, digest
from hlatctl.run.errors import EvaluationError
from hlatctl.run.journal import JournalWriter, eval_writer
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths

_FIRST: dict[str, Any] = {"versions": {"lm_eval": "0.4.13"}, "limit": None, "shots": 0, "prompts": "ab" * 32}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"versions": {"lm_eval": "0.4.14"}}, ("versions.lm_eval", '"0.4.13"', '"0.4.14"')),
        ({"limit": 10}, ("limit", "null", "10")),
        ({"prompts": "cd" * 32}, ("prompts", "abababababababab", "cdcdcdcdcdcdcdcd")),
        ({"code": {"timeout_s": 3.0}}, ("code.timeout_s", "not recorded", "3.0")),
        ({"environment": {}}, ("environment", "not recorded", "recorded")),
        ({}, None),
    ],
)
def test_the_first_difference_is_named_with_both_values(
    changes: dict[str, Any], difference: tuple[str, str, str] | None
) -> None:
    assert contract.first_difference(_FIRST, {**_FIRST, **changes}) == difference
    assert contract.differences(_FIRST, {**_FIRST, **changes}) == ([difference] if difference else [])


def test_the_model_s_own_files_are_ignored_across_runs() -> None:
    one, other = ({**_FIRST, "model": {"tokenizer": digit}} for digit in "ab")
    assert contract.digest(one) != contract.digest(other)
    assert contract.across_runs(one) == contract.across_runs(other) == _FIRST


_PIQA: dict[str, Any] = {"versions": {"lm_eval": "0.4.13"}, "limit": None, "shots": 0, "prompts": "ab" * 32}
_BOOLQ: dict[str, Any] = {**_PIQA, "prompts": "cd" * 32}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def score(run: RunPaths, *tasks: str, folder: str = "", stored: str = "tasks/{}.json") -> None:
    """Store something that an evaluation of tasks leaves."""
    for task in tasks:
        path = run.eval(1000) / folder / stored.format(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def evaluating(run: RunPaths, milestone_tokens: int) -> AbstractContextManager[None]:
    def refuse(holder: Holder) -> None:
        raise AssertionError(holder)

    return hold(run.eval_lease(milestone_tokens), refuse)


def asked(**tasks: dict[str, Any]) -> Contracts:
    return Contracts(tasks=tasks)


def mean(*names: str, **tasks: dict[str, Any]) -> Contracts:
    """Return the contracts of tasks, and of the mean over some of them."""
    return Contracts(tasks=tasks, figures={"mean": {"tasks": {name: digest(tasks[name]) for name in names}}})


def test_the_first_contracts_are_recorded_and_known_ever_after(run: RunPaths) -> None:
    assert (contract.read_record(run), contract.own_contracts(run)) == (Record(), "")
    for _ in range(2):
        assert admit(run, asked(piqa=_PIQA)).numbers == {"piqa": 1}
    assert contract.read_record(run) == Record(tasks={"piqa": [_PIQA]})
    assert contract.own_contracts(run) == "1"


def test_another_task_is_added_and_a_subset_changes_nothing(run: RunPaths) -> None:
    admit(run, asked(piqa=_PIQA))
    assert admit(run, mean("piqa", "boolq", piqa=_PIQA, boolq=_BOOLQ)).numbers == {"piqa": 1, "boolq": 1, "mean": 1}
    before = run.contract.read_bytes()
    assert admit(run, asked(boolq=_BOOLQ)).numbers == {"boolq": 1}
    assert run.contract.read_bytes() == before


def test_a_task_whose_contract_differs_is_refused_by_its_name_and_first_difference(run: RunPaths) -> None:
    admit(run, asked(piqa=_PIQA, boolq=_BOOLQ))
    score(run, "piqa", "boolq")
    kept = contract.read_record(run)
    for ask in (admit, check_record):
        with pytest.raises(EvaluationError, match=r"json: boolq: limit was null when .* and is 10 now; scores"):
            ask(run, asked(piqa=_PIQA, boolq={**_BOOLQ, "limit": 10}, arc=_PIQA))
        with pytest.raises(EvaluationError, match=r"piqa: shots was 0 .* and is 5 now \(1 more tasks differ\)") as e:
            ask(run, asked(piqa={**_PIQA, "shots": 5}, boolq={**_BOOLQ, "shots": 5}))
        apart = "`hlatctl eval run --new-contract`, with the same OVERRIDES, keeps the scores of both apart"
        assert e.value.hint == f"put it back; or {apart}"
        with pytest.raises(EvaluationError, match=r"piqa: code was not recorded when .* and is 1 now") as e:
            ask(run, asked(piqa={**_PIQA, "code": 1}))
        assert e.value.hint == apart
    assert contract.read_record(run) == kept


def test_a_new_contract_is_kept_apart_for_its_task_only(run: RunPaths) -> None:
    other = {**_PIQA, "shots": 5}
    admit(run, asked(piqa=_PIQA, boolq=_BOOLQ))
    score(run, "piqa")
    assert check_record(run, asked(piqa=other), new=True).numbers == {"piqa": 2}
    assert contract.read_record(run).tasks["piqa"] == [_PIQA], "a check records nothing"
    assert admit(run, asked(piqa=other, boolq=_BOOLQ), new=True).numbers == {"piqa": 2, "boolq": 1}
    assert admit(run, asked(piqa=other)).numbers == {"piqa": 2}
    assert admit(run, asked(piqa=_PIQA)).numbers == {"piqa": 1}
    with pytest.raises(EvaluationError, match="piqa: limit was null"):
        admit(run, asked(piqa={**other, "limit": 10}))
    record = contract.read_record(run)
    assert record.numbered(1) == asked(piqa=_PIQA, boolq=_BOOLQ)
    assert record.numbered(2) == asked(piqa=other)
    assert record.numbered(3) == Contracts(tasks={})
    assert [record.find("piqa", digest(fields)) for fields in (_PIQA, other, _BOOLQ)] == [1, 2, None]
    assert [contract.folder(number) for number in ("1", "2", "", "simulated", "7" * 64)] == [
        "",
        "contract-2",
        "",
        "",
        "",
    ]


def test_a_group_of_other_parts_is_kept_apart_and_never_refused(run: RunPaths) -> None:
    admit(run, mean("piqa", piqa=_PIQA))
    assert admit(run, mean("piqa", "boolq", piqa=_PIQA, boolq=_BOOLQ)).numbers == {"piqa": 1, "boolq": 1, "mean": 2}


@pytest.mark.parametrize("stored", ["tasks/{}.json", "answers/{}.jsonl", "items-{}.parquet"])
def test_a_contract_that_measured_nothing_is_replaced_until_it_has(run: RunPaths, stored: str) -> None:
    wrong = {**_PIQA, "limit": 10}
    admit(run, mean("piqa", "boolq", piqa=wrong, boolq=_BOOLQ))
    score(run, "boolq")
    for ask in (check_record, admit):
        accepted = ask(run, mean("piqa", "boolq", piqa=_PIQA, boolq=_BOOLQ))
        assert accepted.numbers == {"piqa": 1, "boolq": 1, "mean": 1}
        assert accepted.dropped == (
            "the contract of piqa in an earlier evaluation that measured nothing is replaced: "
            "limit was 10 and is null now"
        )
    assert contract.read_record(run).numbered(1) == mean("piqa", "boolq", piqa=_PIQA, boolq=_BOOLQ)
    assert admit(run, asked(piqa=_PIQA)).dropped == ""
    score(run, "piqa", stored=stored)
    with pytest.raises(EvaluationError, match="piqa: limit was null"):
        admit(run, asked(piqa=wrong))


def test_of_several_contracts_only_the_last_ones_without_results_are_replaced(run: RunPaths) -> None:
    fields = [{**_PIQA, "limit": limit} for limit in (None, 1, 2, 3)]
    admit(run, asked(piqa=fields[0]))
    score(run, "piqa")
    with pytest.raises(EvaluationError, match="limit was null"):
        admit(run, asked(piqa=fields[1]))
    for other in fields[1:3]:
        assert admit(run, asked(piqa=other), new=True).numbers == {"piqa": 2}
    score(run, "piqa", folder="contract-2")
    assert admit(run, asked(piqa=fields[3]), new=True).numbers == {"piqa": 3}
    assert contract.read_record(run).tasks["piqa"] == [fields[0], fields[2], fields[3]]


def test_a_contract_whose_scores_only_the_journal_has_is_kept(run: RunPaths) -> None:
    admit(run, asked(piqa=_PIQA))
    with JournalWriter(run, eval_writer(1000)) as writer:
        writer.append("eval_task_finished", milestone_tokens=1000, task="piqa", contract="1", scores={})
    with pytest.raises(EvaluationError, match="piqa: limit was null"):
        admit(run, asked(piqa={**_PIQA, "limit": 1}))


def test_a_contract_is_kept_while_an_evaluation_runs_under_it(run: RunPaths) -> None:
    wrong, right = asked(piqa={**_PIQA, "limit": 10}), asked(piqa=_PIQA)
    with evaluating(run, 1000):
        with contract.withdrawn(run, 1000):
            admit(run, wrong, milestone_tokens=1000)
            for ask in (check_record, admit):
                with pytest.raises(EvaluationError, match="piqa: limit was 10"):
                    ask(run, right)
        assert check_record(run, right).numbers == {"piqa": 1}, "it has ended"
        admit(run, wrong, milestone_tokens=1000)
    assert check_record(run, right).dropped, "it was killed"
    with evaluating(run, 1000), evaluating(run, 2000):
        # Two evaluations have begun, and one of them was tried before: the first one to be admitted decides.
        assert admit(run, right, milestone_tokens=2000).numbers == {"piqa": 1}
        with pytest.raises(EvaluationError, match="piqa: limit was null"):
            admit(run, wrong, milestone_tokens=1000)
        assert admit(run, right, milestone_tokens=1000).dropped == ""


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"v": 7, "tasks": {}, "figures": {}}', '{"tasks": 3}', '{"v": 2, "tasks": [], "figures": {}}'],
)
def test_a_damaged_record_is_refused_rather_than_replaced(run: RunPaths, content: str) -> None:
    run.evals.mkdir(parents=True)
    run.contract.write_text(content, encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"contract\.json: can't be read \(.*\), so the contracts"):
        admit(run, asked(piqa=_PIQA))
    assert contract.own_contracts(run) == ""
    assert run.contract.read_text(encoding="utf-8") == content


def test_a_changed_digit_in_the_record_is_noticed(run: RunPaths) -> None:
    admit(run, asked(piqa=_PIQA))
    text = run.contract.read_text(encoding="utf-8")
    run.contract.write_text(text.replace("0.4.13", "0.4.14"), encoding="utf-8")
    with pytest.raises(EvaluationError, match="is not as it was written"):
        contract.read_record(run)
