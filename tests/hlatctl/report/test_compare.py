"""Which scores are best, tied or not ranked."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.report import baselines, compare_tables
from hlatctl.report.compare import Comparison, RunScores, compare, run_scores
from hlatctl.run.contract import Record, digest
from hlatctl.run.errors import ConfigError
from hlatctl.run.state import MilestoneState
from tests.hlatctl.scored_runs import (
    CONTRACT,
    FIELDS,
    OTHER,
    OTHER_FIELDS,
    RECORDED,
    Scores,
    carrying,
    contracts_of,
    hlat_scores,
    score,
)


def run(
    name: str, scores: Scores, contract: str | None = CONTRACT, simulated: bool = False, **changes: Any
) -> RunScores:
    """Return a run's scores; ``changes`` are fields of its contract."""
    known = {name: contracts_of({**fields, **changes}) for name, fields in RECORDED.items()}
    one, other = known.values()
    recorded = Record(
        tasks={task: [fields, other.tasks[task]] for task, fields in one.tasks.items()},
        figures={group: [fields, other.figures[group]] for group, fields in one.figures.items()},
    )
    if contract in known:
        scores = carrying(scores, known[contract])
    milestone = MilestoneState(200_000_000_000, 47_684, "evaluated", scores)
    return run_scores(name, milestone, simulated=simulated, contract=contract, recorded=recorded)


def mmlu(value: Any, stderr: float | None = 0.004, **more: Any) -> Scores:
    return {"mmlu": score("acc", value, stderr, 14_042, **more)}


def row(table: Comparison, row_id: str) -> list[tuple[float, str, str] | None]:
    (cells,) = (row.cells for row in table.rows if row.id == row_id)
    return [(round(cell.value, 3), cell.standing, cell.remark) if cell else None for cell in cells]


@pytest.mark.parametrize(
    ("values", "standings"),
    [
        # 1.96 * sqrt(0.4^2 + 0.4^2) = 1.109 percent points
        ((0.4, 0.4112, 0.3997), ["", "best", ""]),
        ((0.4, 0.4109, 0.3997), ["tie", "tie", ""]),
        ((0.4, 0.4, 0.3), ["tie", "tie", ""]),
        ((0.4,), [""]),
    ],
)
def test_the_best_is_marked_if_no_other_is_within_its_error(values: tuple[float, ...], standings: list[str]) -> None:
    table = compare([run(str(value), mmlu(value)) for value in values])
    assert [cell and cell[1] for cell in row(table, "mmlu")] == standings


def test_made_up_scores_are_rows_of_their_own_and_not_ranked() -> None:
    scores = {"mmlu_simulated": score("acc", 0.5, 0.07, 40)}
    table = compare([run("real", mmlu(0.4)), run("dry", scores, simulated=True)])
    assert row(table, "mmlu_simulated") == [None, (50.0, "", "simulated")]
    assert [each.id for each in compare([run("real", {**mmlu(0.4), **scores})]).rows] == ["mmlu"]


@pytest.mark.parametrize("errors", [(0.004, None), (None, 0.004)])
def test_an_unknown_standard_error_counts_as_zero(errors: tuple[float | None, float | None]) -> None:
    # 1.96 * 0.4 = 0.784 percent points
    close = compare([run("a", mmlu(0.4, errors[0])), run("b", mmlu(0.4078, errors[1]))])
    assert row(close, "mmlu") == [(40.0, "tie", ""), (40.78, "tie", "")]
    apart = compare([run("a", mmlu(0.4, errors[0])), run("b", mmlu(0.4079, errors[1]))])
    assert row(apart, "mmlu") == [(40.0, "", ""), (40.79, "best", "")]


def test_without_any_standard_error_neither_is_best() -> None:
    table = compare([run("a", mmlu(0.4, None)), run("b", mmlu(0.9, None)), run("c", mmlu(0.3))])
    assert row(table, "mmlu") == [(40.0, "", ""), (90.0, "", ""), (30.0, "", "")]


def test_other_and_unknown_contracts_and_simulations_are_shown_but_not_ranked() -> None:
    runs = [
        run("a", mmlu(0.4)),
        run("b", mmlu(0.3)),
        run("c", mmlu(0.9), OTHER),
        run("d", mmlu(0.9), None),
        run("e", mmlu(0.9), CONTRACT, simulated=True),
    ]
    assert row(compare(runs), "mmlu") == [
        (40.0, "best", ""),
        (30.0, "", ""),
        (90.0, "", "another_contract"),
        (90.0, "", "contract_unknown"),
        (90.0, "", "simulated"),
    ]


def test_the_leftmost_run_with_a_value_sets_the_contract_of_a_row() -> None:
    runs = [run("a", {}), run("b", mmlu(0.4), OTHER), run("c", mmlu(0.5), OTHER), run("d", mmlu(0.6))]
    assert row(compare(runs), "mmlu")[1:] == [(40.0, "", ""), (50.0, "best", ""), (60.0, "", "another_contract")]


def test_runs_with_unknown_contracts_are_never_ranked() -> None:
    table = compare([run("a", mmlu(0.4), None), run("b", mmlu(0.5), None)])
    assert row(table, "mmlu") == [(40.0, "", "contract_unknown"), (50.0, "", "contract_unknown")]


def test_a_score_s_own_contract_has_priority_over_its_milestone_s() -> None:
    own = contracts_of(FIELDS).hashes["mmlu"]
    table = compare([run("a", mmlu(0.4)), run("b", mmlu(0.5, contract=own), OTHER), run("c", mmlu(0.6), OTHER)])
    assert row(table, "mmlu") == [(40.0, "", ""), (50.0, "best", ""), (60.0, "", "another_contract")]


def test_a_mean_with_one_score_of_another_contract_is_not_ranked() -> None:
    mixed = hlat_scores()
    mixed["triviaqa"] = {**mixed["triviaqa"], "contract": contracts_of(OTHER_FIELDS).hashes["triviaqa"]}
    table = compare([run("a", hlat_scores()), run("b", mixed)])
    assert [cell and cell[2] for cell in row(table, "world_knowledge")] == ["", "another_contract"]
    assert [cell and cell[2] for cell in row(table, "nq_open")] == ["", ""]


def test_published_scores_are_ranked_and_marked() -> None:
    table = compare([run("a", mmlu(0.47))], baselines.load("hlat"))
    assert row(table, "mmlu") == [
        (47.0, "tie", ""),
        (41.318, "tie", "published"),
        (35.1, "", "published"),
        (45.3, "", "published"),
        (30.552, "", "published"),
        (41.075, "tie", "published"),
    ]
    assert [column.source for column in table.columns] == [None, *["HLAT, arXiv 2404.10630v1, Tables 3 and 4"] * 5]


def _tasks(**changes: Any) -> dict[str, Any]:
    """Return the tasks of a contract with a changed GSM8K."""
    return {**FIELDS["tasks"], "gsm8k": {**FIELDS["tasks"]["gsm8k"], **changes}}


@pytest.mark.parametrize(
    ("changes", "n", "alike"),
    [
        ({"seed": 7}, 1_319, True),
        ({"limit": 2_000}, 1_319, True),
        ({"limit": 40}, 40, False),
        ({"tasks": _tasks(shots=1)}, 1_319, False),
        ({"tasks": _tasks(items=790)}, 790, False),
        ({"tasks": {}}, 1_319, False),
    ],
)
def test_published_scores_are_ranked_only_if_they_were_measured_equally(
    changes: dict[str, Any], n: int, alike: bool
) -> None:
    table = compare([run("a", {"gsm8k": score("exact_match", 0.9, 0.01, n)}, **changes)], baselines.load("hlat"))
    mine, *theirs = row(table, "gsm8k")
    assert mine == (90.0, "best" if alike else "", "")
    assert {cell and cell[2] for cell in theirs} == {"published" if alike else "published_otherwise"}


def test_scores_without_a_recorded_contract_are_not_ranked_with_published_ones() -> None:
    table = compare([run("a", mmlu(0.9), "f" * 64), run("b", mmlu(0.1), "f" * 64)], baselines.load("hlat"))
    mine, other, *theirs = row(table, "mmlu")
    assert (mine, other) == ((90.0, "best", ""), (10.0, "", ""))
    assert {cell and cell[2] for cell in theirs} == {"published_otherwise"}


def test_a_cell_says_how_it_was_measured() -> None:
    table = compare([run("a", {"gsm8k": score("exact_match", 0.9, 0.01, 40)}, limit=40)], baselines.load("hlat"))
    (cells,) = (row.cells for row in table.rows if row.id == "gsm8k")
    mine, hlat, llama = cells[:3]
    assert mine is not None
    assert hlat is not None
    assert llama is not None
    assert (mine.n, mine.conditions.shots, mine.conditions.limit, mine.conditions.whole) == (40, 8, 40, False)
    assert mine.conditions.data is not None
    assert [(cell.n, cell.conditions.shots, cell.conditions.whole) for cell in (hlat, llama)] == [
        (1_319, 8, None),
        (None, 8, None),
    ]
    assert (table.columns[0].limits, len(table.columns[0].data)) == ([40], 1)
    assert (table.columns[1].limits, table.columns[1].data) == ([], [])


def test_runs_with_different_tokenizers_are_ranked_and_with_different_code_not() -> None:
    models = [{"tokenizer": {"tokenizer.json": digit * 64}} for digit in "ab"]
    runs = [run(str(number), mmlu(0.4 + 0.1 * number), model=model) for number, model in enumerate(models)]
    runs.append(run("fork", mmlu(0.9), model=models[0], source={"lm_eval": "c" * 64}))
    table = compare(runs)
    assert row(table, "mmlu") == [(40.0, "", ""), (50.0, "best", ""), (90.0, "", "another_contract")]
    assert table.notes == [
        "fork has another contract for MMLU: source.lm_eval is cccccccccccccccc, elsewhere not recorded"
    ]


def test_the_error_of_a_mean_assumes_independent_tasks() -> None:
    (row_,) = (row for row in compare([run("a", hlat_scores())]).rows if row.id == "world_knowledge")
    (cell,) = row_.cells
    assert cell is not None
    # sqrt(0.69^2 + 0.37^2) / 2
    assert (cell.value, cell.stderr) == pytest.approx((38.85, 0.3915), abs=1e-4)
    assert cell.n == 21_554


def test_a_mean_needs_all_of_its_tasks() -> None:
    scores = hlat_scores()
    del scores["winogrande"]
    table = compare([run("a", scores)])
    assert row(table, "commonsense") == [None]
    assert row(table, "commonsense_norm") == [(59.8, "", "")]


def test_a_group_s_recorded_score_has_priority_over_the_mean_of_its_tasks() -> None:
    scores = hlat_scores()
    scores["commonsense"] = score("acc", 0.5, 0.003, 6_000)
    scores["commonsense_acc_norm"] = score("acc_norm", 0.6, 0.002, 5_000)
    del scores["piqa"]
    table = compare([run("a", scores)])
    assert row(table, "commonsense") == [(50.0, "", "")]
    assert row(table, "commonsense_norm") == [(60.0, "", "")]
    assert "commonsense" not in [row.id for row in table.rows if row.section == "Other tasks"]


def test_a_score_of_another_metric_is_another_score() -> None:
    table = compare([run("a", {"gsm8k": score("acc", 0.1, 0.01, 1_319)})])
    assert [(row.section, row.id, row.metric) for row in table.rows] == [("Other tasks", "gsm8k", "acc")]


@pytest.mark.parametrize(("values", "best"), [((0.47, 0.62), 0), ((0.38, 0.52), 1), ((0.5, 0.3), 0)])
def test_the_ideal_share_of_stereotypes_is_half(values: tuple[float, float], best: int) -> None:
    scores = [{"crows_pairs_english": score("pct_stereotype", value, 0.01, 1_508)} for value in values]
    cells = row(compare([run("a", scores[0]), run("b", scores[1])]), "crows_pairs")
    assert [cell and cell[1] for cell in cells] == (["best", ""] if best == 0 else ["", "best"])


def test_the_lowest_loss_is_best_and_unknown_metrics_have_no_best_value() -> None:
    table = compare([run("a", hlat_scores()), run("b", hlat_scores(0.05))])
    assert [cell and cell[1] for cell in row(table, "validation_loss")] == ["", "best"]
    assert [cell and cell[1] for cell in row(table, "word_error")] == ["", ""]


def test_damaged_scores_are_left_out() -> None:
    scores: dict[str, Any] = {"mmlu": 3, "boolq": {"metric": "acc", "value": "nan"}, "sciq": {"value": 0.5}}
    table = compare([run("a", {**scores, **{"gsm8k": score("exact_match", 0.1, math.nan, 5)}})])
    assert [(row.id, row.metric) for row in table.rows] == [("gsm8k", "accuracy"), ("sciq", "")]
    assert table.rows[0].cells[0] is not None
    assert table.rows[0].cells[0].stderr is None


def test_an_own_definition_and_a_fraction_of_its_items_are_noted() -> None:
    how = {"items": 10, "limit": 0.5, "shots": 0}
    tasks: dict[str, list[dict[str, Any]]] = {"my_sums": [{**how, "own": True}], "piqa": [how]}
    scores = {name: score("acc", 0.4, 0.1, 5, contract=digest(known[0])) for name, known in tasks.items()}
    milestone = MilestoneState(200_000_000_000, 47_684, "evaluated", scores)
    mine = run_scores("mine", milestone, simulated=False, contract=None, recorded=Record(tasks=tasks))
    table = compare([mine])
    assert table.notes == ["mine: own definition of my_sums"]
    assert "0.5 of the items" in compare_tables.text(table)


@pytest.mark.parametrize(
    ("limit", "items", "limits", "shown"),
    [(5, 10, [5], "5 items"), (None, 5, [None], "none"), (None, None, [], "unknown"), (None, 10, [], "unknown")],
)
def test_the_limit_that_an_import_names_is_shown(
    limit: int | None, items: int | None, limits: list[float | None], shown: str
) -> None:
    imported = {"piqa": score("acc", 0.4, 0.1, 5, items=items)}
    origin = {"form": "lm_eval", "version": "0.4.13", "limit": limit}
    milestone = MilestoneState(0, 0, "evaluated", imported)
    table = compare([run_scores("theirs", milestone, simulated=False, contract=None, imported=origin)])
    assert table.columns[0].limits == limits
    (line,) = (line for line in compare_tables.text(table).splitlines() if line.startswith("limit"))
    assert line.split(maxsplit=1)[1] == shown


def test_text_of_a_run_is_never_markup() -> None:
    table = compare([run("a", {"x|*y*_$\\%": score("50%_{m}", 0.5, None, 1)})])
    assert "| x\\|\\*y\\*\\_$\\\\% |  | 1 | 50%\\_{m} |" in compare_tables.markdown(table)
    assert r"x|*y*\_\$\textbackslash{}\% &  & 1 & 50\%\_\{m\} & " in compare_tables.latex(table)


@given(st.lists(st.tuples(st.floats(0, 1), st.none() | st.floats(0, 0.1)), min_size=2, max_size=5), st.floats(0, 1))
def test_the_best_is_the_highest_and_runs_under_other_contracts_change_nothing(
    values: list[tuple[float, float | None]], outsider: float
) -> None:
    runs = [run(str(index), mmlu(*pair)) for index, pair in enumerate(values)]
    cells = [cell for cell in row(compare(runs), "mmlu") if cell]
    top = max(value for value, _, _ in cells)
    standings = [standing for _, standing, _ in cells]
    assert all(value == top for value, standing, _ in cells if standing == "best")
    assert standings.count("best") <= 1
    assert not ("best" in standings and "tie" in standings)
    assert standings.count("tie") != 1
    assert row(compare([*runs, run("other", mmlu(outsider), OTHER)]), "mmlu")[:-1] == cells


def test_every_published_score_has_a_row_and_rows_are_unique() -> None:
    rows = {spec.id: spec for spec in baselines.layout().rows}
    assert Counter(spec.id for spec in baselines.layout().rows).most_common(1)[0][1] == 1
    for name in baselines.names():
        for model in baselines.load(name).models:
            assert model.figures.keys() <= rows.keys()
            assert model.tokens > 0
            assert all(rows[key].unit == "percent" and 0 < value < 100 for key, (value, _) in model.figures.items())
            assert all(stderr is None or 0 < stderr < 10 for _, stderr in model.figures.values())


def test_all_published_scores_of_the_paper_are_present() -> None:
    figures = {model.name: model.figures for model in baselines.load("hlat").models}
    assert {name: len(known) for name, known in figures.items()} == {
        "HLAT-7B": 21,
        "LLaMA-1-7B": 17,
        "LLaMA-2-7B": 8,
        "OpenLLaMA-1-7B": 21,
        "OpenLLaMA-2-7B": 21,
    }
    assert figures["HLAT-7B"]["gsm8k"] == (9.401, 0.804)
    assert figures["LLaMA-2-7B"]["pass_at_100"] == (45.6, None)


def test_unknown_published_scores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--baselines=../hlat: no set .* has this name\nhint: did you mean"):
        baselines.load("../hlat")


def test_a_task_that_was_skipped_is_noted() -> None:
    milestone = MilestoneState(200_000_000_000, 47_684, "evaluated", mmlu(0.4), skipped={"humaneval": "no sandbox"})
    table = compare([run_scores("mine", milestone, simulated=False, contract=CONTRACT)])
    assert table.notes == ["mine: humaneval: skipped, no sandbox"]


def test_contracts_have_names_of_letters_however_many_there_are() -> None:
    assert [compare_tables._letters(number) for number in (0, 25, 26, 51, 52, 701, 702)] == [
        "A", "Z", "AA", "AZ", "BA", "ZZ", "AAA",
    ]  # fmt: skip
