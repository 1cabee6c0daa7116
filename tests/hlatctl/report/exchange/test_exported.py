"""What exports say of the items that were evaluated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hlatctl.report.exchange import exported, lighteval, lm_eval, olmes, source
from hlatctl.report.exchange.exported import Exported
from hlatctl.report.exchange.imported import some
from hlatctl.run.fold import read_state
from tests.hlatctl.exported_runs import TOKENS, exported_run


@pytest.fixture
def whole_run(tmp_path: Path) -> Exported:
    run = exported_run(tmp_path / "runs")
    return exported.read(run, read_state(run).milestones[TOKENS])


@pytest.mark.parametrize(
    ("form", "limit", "items"), [(lm_eval, 0.25, 5276), (lighteval, None, 5276), (olmes, None, None)]
)
def test_an_export_of_a_fraction_of_the_items_is_not_taken_for_all_of_them(
    whole_run: Exported, tmp_path: Path, form: ModuleType, limit: float | None, items: int | None
) -> None:
    quarter = replace(
        whole_run,
        contract={**whole_run.contract, "limit": 0.25},
        entries=[replace(each, items=each.count and 4 * each.count) for each in whole_run.entries],
    )
    path = tmp_path / "results.json"
    path.write_text(json.dumps(form.write(quarter)))
    found = source.read(path).figures
    figure = found.figures["gsm8k"]
    assert (found.limit, figure.n, figure.items) == (limit, 1319, items)


def test_olmes_has_the_number_of_items_as_the_limit_unless_these_are_all(whole_run: Exported) -> None:
    (first, *_) = whole_run.entries
    entries = [replace(first, items=items) for items in (first.count, 9_999, None)]
    for limit, expected in ((0.25, [None, first.count, first.count]), (None, [None, first.count, None])):
        found = replace(whole_run, entries=entries, contract={**whole_run.contract, "limit": limit})
        assert [task["task_config"]["limit"] for task in olmes.write(found)["tasks"]] == expected


def test_a_limit_is_a_number_of_items_or_a_fraction() -> None:
    assert [some(value) for value in (5, 5.0, 0.25, 0, -1, 1.5, "5", None)] == [5, 5, 0.25, 0, None, None, None, None]
