from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hlatctl.report.run_index import Row
from hlatctl.report.run_list import Filter, age, differing, ordered, since, tag_filter
from hlatctl.run.errors import ConfigError

NOW = 1_700_000_000.0
ROW = Row(
    run_id="a",
    status="finished",
    simulated=False,
    step=10,
    total_steps=10,
    tokens=100,
    loss=3.0,
    validation_loss=None,
    created_unix_s=NOW - 100_000,
    last_event_unix_s=NOW - 90_000,
    experiment="quickstart",
    sweep="",
    name="",
    tags={"model": "small"},
    note="",
    overrides=["optimizer.lr=1e-4", "train.seq_len=512"],
    scores={},
    node_hours=1.0,
    cost_usd=None,
    path="/a",
    problem=None,
)


def row(**fields: Any) -> Row:
    return dataclasses.replace(ROW, **fields)


def test_only_what_differs_is_shown_with_the_shortest_distinct_key() -> None:
    rows = [ROW, row(overrides=["optimizer.lr=3e-4", "train.seq_len=512"]), row(overrides=["train.seq_len=512"])]
    assert differing(rows) == ["lr=1e-4", "lr=3e-4", ""]
    rows = [row(overrides=["model.name=x"]), row(overrides=["cluster.name=x", "+backend.env.A=1"])]
    assert differing(rows) == ["model.name=x", "cluster.name=x A=1"]
    assert differing([ROW]) == [""]


@pytest.mark.parametrize(
    ("tags", "statuses", "experiment", "since_unix_s", "taken"),
    [
        ([], (), None, None, True),
        (["model"], (), None, None, True),
        (["model=small"], ("failed", "finished"), "quickstart", NOW - 90_000, True),
        (["model=large"], (), None, None, False),
        (["other"], (), None, None, False),
        ([], ("running",), None, None, False),
        ([], (), "drill", None, False),
        ([], (), None, NOW - 80_000, False),
    ],
)
def test_a_filter_takes_runs_that_have_everything(
    tags: list[str], statuses: tuple[str, ...], experiment: str | None, since_unix_s: float | None, taken: bool
) -> None:
    chosen = Filter(tags=tag_filter(tags), statuses=statuses, experiment=experiment, since_unix_s=since_unix_s)
    assert chosen.takes(ROW) is taken


def test_rows_without_a_value_or_with_nan_come_first() -> None:
    rows = [row(run_id="b", loss=2.0), row(run_id="none", loss=None), row(run_id="a", loss=1.0), row(loss="nan")]
    assert [each.loss for each in ordered(rows, "loss")] == [None, "nan", 1.0, 2.0]
    assert [each.run_id for each in ordered(rows, "loss", reverse=True)][:2] == ["b", "a"]
    with pytest.raises(ConfigError, match="did you mean loss"):
        ordered(rows, "los")


def test_an_age_or_a_date_is_a_time() -> None:
    assert since("7d", NOW) == NOW - 7 * 86_400
    assert since("2023-11-14", NOW) == 1_699_920_000
    for text in ("soon", "7", "2023-14-11", "-1d"):
        with pytest.raises(ConfigError, match="--since"):
            since(text, NOW)


def test_an_age_has_one_unit() -> None:
    assert [age(row(last_event_unix_s=NOW - s), NOW) for s in (5, 300, 7200, 90_000)] == ["5 s", "5 min", "2 h", "1 d"]
