"""Differences item by item: known values of the tests, what can't be paired, and how contracts differ by task."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest

from hlatctl.report.compare import RunScores, run_scores
from hlatctl.report.items import Item, TaskItems
from hlatctl.report.paired import (
    DIFFERENT,
    EQUAL,
    Contrast,
    _tail_bound,
    as_json,
    compare_items,
    contrast,
    text,
    together,
)
from hlatctl.run.contract import Fields, Record, digest
from hlatctl.run.state import MilestoneState


def of(
    values: Sequence[float], *, metric: str = "acc", document: str = "", asked: str = "", task: str = "t"
) -> TaskItems:
    items = {
        str(n): Item(
            task=task,
            name=str(n),
            document=f"{document} {n}",
            asked=f"{document} {n} {asked}",
            value=value,
            target="B",
            answer=f"answer {value:g}",
        )
        for n, value in enumerate(values)
    }
    return TaskItems(metric=metric, items=items)


def test_right_and_wrong_answers_are_compared_by_mcnemars_exact_test() -> None:
    first, second = of([0] * 8 + [1] + [1] * 11), of([1] * 8 + [0] + [1] * 11)
    (row,) = compare_items({"t": first}, {"t": second}, {"t": ["t"]}, {}).rows
    assert (len(row.gained), len(row.lost), row.items) == (8, 1, 20)
    assert row.p == pytest.approx(2 * (1 + 9) / 2**9)  # of 9 flips, at most one is lost
    assert row.second - row.first == pytest.approx(7 / 20)
    assert row.low < 7 / 20 < row.high
    assert row.is_real


def test_equal_answers_differ_by_nothing() -> None:
    (row,) = compare_items({"t": of([1, 0])}, {"t": of([1, 0])}, {"t": ["t"]}, {}).rows
    assert (row.p, row.holm, row.low, row.high, row.gained, row.lost) == (1.0, 1.0, 0.0, 0.0, [], [])


def test_other_values_are_compared_by_signs() -> None:
    less, more = of([0.1 * n for n in range(12)]), of([0.1 * n + 0.05 for n in range(12)])
    (row,) = compare_items({"t": less}, {"t": more}, {"t": ["t"]}, {}).rows
    assert row.p == pytest.approx(2 / 2**12, abs=2e-3)
    assert row.low == pytest.approx(0.05)
    assert row.high == pytest.approx(0.05)


def test_several_rows_are_corrected_by_holm() -> None:
    before = {name: of([0] * 10) for name in "abc"}
    after = {"a": of([1] * 7 + [0] * 3), "b": of([1] * 6 + [0] * 4), "c": of([0] * 10)}
    rows = {row.name: row for row in compare_items(before, after, {name: [name] for name in "abc"}, {}).rows}
    assert rows["a"].holm == pytest.approx(3 * rows["a"].p)
    assert rows["b"].holm == pytest.approx(2 * rows["b"].p)
    assert rows["c"].holm == 1.0
    assert rows["a"].is_real
    assert not rows["b"].is_real, "p is 0.03125"


def test_many_rows_of_continuous_values_can_be_more_than_chance() -> None:
    """2,000 draws alone give no chance below 0.001, and Holm's correction multiplies it by the number of rows."""
    names = [f"task{number}" for number in range(52)]
    before = {name: of([0.1 * (n % 7) for n in range(40)], metric="bits_per_byte", task=name) for name in names}
    after = {name: of([0.1 * (n % 7) - 0.05 for n in range(40)], metric="bits_per_byte", task=name) for name in names}
    rows = compare_items(before, after, {name: [name] for name in names}, {}).rows
    assert all(row.is_real for row in rows)
    assert max(row.holm for row in rows) < 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_a_rare_difference_is_never_below_the_exact_chance(seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    for values in (rng.exponential(size=12), rng.normal(0.8, 1.0, 12), numpy.ones(12), rng.pareto(1.5, 12) + 1):
        signs = numpy.array(list(itertools.product((-1, 1), repeat=values.size)))
        exact = float((abs(signs @ abs(values)) >= abs(values.sum()) - 1e-12).mean())
        assert _tail_bound(values) >= exact


def test_a_mean_over_tasks_counts_each_task_once_as_the_group_s_score_does() -> None:
    first = {"x": of([0.0] * 90, task="x"), "y": of([0.0] * 10, task="y")}
    second = {"x": of([1.0] * 9 + [0.0] * 81, task="x"), "y": of([1.0] * 5 + [0.0] * 5, task="y")}
    groups = {"g": ["x", "y"]}
    (items,) = compare_items(first, second, groups, {}).rows
    (tasks,) = compare_items(first, second, groups, {}, {("g", "acc")}).rows
    assert [items.second, tasks.second] == pytest.approx([14 / 100, (0.1 + 0.5) / 2])
    assert (items.tasks, tasks.tasks) == (0, 2)
    assert tasks.low < 0.3 < tasks.high
    assert tasks.p < 0.01
    assert len(tasks.gained) == 14
    found = compare_items(first, second, groups, {}, {("g", "acc")})
    assert "\ng is the mean over its 2 tasks, whatever their numbers of items\n" in text(found, "a", "b", 0)


def test_a_group_of_which_one_lacks_a_task_is_left_out() -> None:
    first = {"x": of([0], task="x"), "y": of([0], task="y")}
    found = compare_items(first, {"x": of([1], task="x")}, {"g": ["x", "y"], "x": ["x"]}, {})
    assert ([row.name for row in found.rows], found.left_out) == (["x"], {"g": "only one of them has y"})


def test_a_group_is_all_items_of_its_tasks() -> None:
    first = {"x": of([0, 1], task="x"), "y": of([0], task="y")}
    second = {"x": of([1, 1], task="x"), "y": of([1], task="y")}
    (row,) = compare_items(first, second, {"g": ["x", "y"]}, {}).rows
    assert row.items == 3
    assert row.first == pytest.approx(1 / 3)
    assert row.second == 1.0
    assert [flip.first.task for flip in row.gained] == ["x", "y"]


def test_items_of_other_documents_are_left_out() -> None:
    first, second = of([0, 1, 1]), of([0, 1])
    assert second.items
    second.items["2"] = Item(task="t", name="2", document="other", asked="other", value=0.0, target="", answer="")
    (row,) = compare_items({"t": first}, {"t": second}, {"t": ["t"]}, {}).rows
    assert (row.items, row.unpaired) == (2, 2)
    found = compare_items({"t": of([1], document="v2")}, {"t": of([1])}, {"t": ["t"]}, {})
    assert (found.rows, found.left_out) == ([], {"t": "no question has the same document and right answer in both"})


def test_items_with_other_prompts_are_paired_and_the_row_says_what_differs() -> None:
    differences = {
        "shots": ("5", "0"),
        "prompts": ("ab" * 32, "cd" * 32),
        "a": ("1", "2"),
        "b": ("", ""),
        "c": ("", ""),
    }
    contrasts = {"t": Contrast(status=DIFFERENT, differences=differences)}
    found = compare_items({"t": of([0] * 8, asked="5")}, {"t": of([1] * 8)}, {"t": ["t"]}, contrasts)
    (row,) = found.rows
    assert (row.items, row.unpaired, row.reworded) == (8, 0, 8)
    said = (
        "t: not only the models differ, so the difference may come from this: shots (5, 0); prompts; a (1, 2); b (, ); "
        "1 more field; the prompts of 8 of 8 items\n"
    )
    assert said in text(found, "x", "y", 0)
    assert as_json(found, "x", "y")["rows"][0]["contracts"] == {"status": "different", "differences": differences}


def test_a_row_whose_contracts_are_equal_has_no_remark_and_an_unknown_one_has() -> None:
    sides = {"t": of([0]), "u": of([0])}, {"t": of([1]), "u": of([1])}
    shown = text(compare_items(*sides, {n: [n] for n in "tu"}, {"t": Contrast(status=EQUAL)}), "x", "y", 0)
    assert "\nt: " not in shown
    assert "u: a contract is not recorded, so it is unknown whether only the models differ\n" in shown
    (row,) = compare_items(*sides, {"g": ["t", "u"]}, {"t": Contrast(status=EQUAL)}).rows
    assert row.contracts == Contrast()


def test_rows_that_can_not_be_compared_say_why() -> None:
    first = {"a": of([1]), "b": of([1]), "c": TaskItems(metric="f1", items=None)}
    second = {"b": of([1], metric="acc_norm"), "c": TaskItems(metric="f1", items=None)}
    found = compare_items(first, second, {name: [name] for name in "abc"}, {})
    assert found.left_out == {
        "a": "only one of them has it",
        "b": "its metrics differ: acc, acc_norm",
        "c": "f1 is no finite number for each item",
    }


def test_the_table_says_what_is_more_than_chance_and_lists_flips() -> None:
    found = compare_items({"t": of([0] * 8)}, {"t": of([1] * 8)}, {"t": ["t"]}, {})
    shown = text(found, "a at 1B tokens", "b at 1B tokens", 1)
    assert "* more than chance (p < 0.05 after Holm's correction for 1 rows): t" in shown
    assert shown.endswith("t: gained\n  t 0, right: B: 0 (answer 0) -> 1 (answer 1)\n")
    assert len(as_json(found, "a", "b")["rows"][0]["gained"]) == 8


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    item = Item(
        task="t", name="1", document="q", asked="q", value=0.0, target="\x1b]0;title\x07", answer="\x1b[2J\u202e\x9b31m"
    )
    wrong, right = (TaskItems(metric="acc", items={"1": replace(item, value=value)}) for value in (0.0, 1.0))
    shown = text(compare_items({"t": wrong}, {"t": right}, {"t": ["t"]}, {}), "a", "b", flips=1)
    assert "right: \\x1b]0;title\\x07: 0 (\\x1b[2J\\u202e\\x9b31m)" in shown
    assert shown.replace("\n", "").isprintable()


def test_items_are_paired_by_document_and_not_by_number() -> None:
    first, second = of([0, 1, 1]), of([0, 1, 1])
    renumbered = {str(9 - int(name)): item for name, item in (second.items or {}).items()}
    (row,) = compare_items({"t": first}, {"t": replace(second, items=renumbered)}, {"t": ["t"]}, {}).rows
    assert (row.items, row.unpaired, row.gained, row.lost) == (3, 0, [], [])


def test_items_without_documents_are_not_paired() -> None:
    known, unknown = of([0, 1]), of([0, 1])
    bare = {name: replace(item, document="", asked="") for name, item in (unknown.items or {}).items()}
    for first, second in ((known, replace(unknown, items=bare)), (replace(unknown, items=bare),) * 2):
        paired = compare_items({"t": first}, {"t": second}, {"t": ["t"]}, {})
        assert paired.rows == []
        assert "have no documents, so" in paired.left_out["t"]


_PIQA: Fields = {"shots": 0, "dtype": "float32", "prompts": "ab" * 32, "model": {"tokenizer": "one"}}


def measured(fields: Fields | None, *, task: str = "piqa", **imported: Any) -> RunScores:
    """Return the scores of a run that measured a task; without fields, its contract is not recorded."""
    record = {"metric": "acc", "value": 0.5, "contract": digest(fields or "other")}
    return run_scores(
        "run",
        MilestoneState(milestone_tokens=1, step=1, scores={task: record | imported}),
        simulated=False,
        contract=None,
        recorded=Record(tasks={"piqa": [fields]} if fields else {}),
        imported={"form": "lm_eval"} if imported else None,
    )


def test_models_with_their_own_tokenizers_have_equal_contracts() -> None:
    other = measured({**_PIQA, "model": {"tokenizer": "two"}})
    assert contrast(measured(_PIQA), other, "piqa") == Contrast(status="equal")


def test_every_field_that_differs_is_named_with_both_values() -> None:
    other = measured({**_PIQA, "shots": 5, "prompts": "cd" * 32})
    assert contrast(measured(_PIQA), other, "piqa") == Contrast(
        status="different", differences={"shots": ("0", "5"), "prompts": ("ab" * 8, "cd" * 8)}
    )


@pytest.mark.parametrize(("shots", "status"), [(5, "different"), (0, "unknown")])
def test_of_scores_of_others_the_conditions_are_compared(shots: int, status: str) -> None:
    found = contrast(measured(_PIQA), measured(None, shots=shots), "piqa")
    assert found == Contrast(status=status, differences={"shots": ("0", "5")} if shots else {})


def test_what_is_not_recorded_is_unknown() -> None:
    assert contrast(measured(_PIQA), measured(None), "piqa") == Contrast(status="unknown")
    assert contrast(measured(_PIQA), measured(_PIQA), "boolq") == Contrast(status="unknown")


def test_programs_are_found_by_their_scores() -> None:
    programs = measured(_PIQA, task="humaneval_pass_at_10")
    assert contrast(programs, programs, "humaneval").status == "equal"


def test_a_group_is_equal_if_all_its_tasks_are() -> None:
    equal, unknown = Contrast(status="equal"), Contrast()
    first, second = ({"shots": ("0", value)} for value in "57")
    assert together([equal, equal]) == equal
    assert together([equal, unknown]) == unknown
    parts = [equal, *(Contrast(status="different", differences=each) for each in (first, second))]
    assert together(parts) == Contrast(status="different", differences=first)
