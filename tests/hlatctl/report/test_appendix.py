"""The appendices on data (shares, consumed tokens, epochs), on the environment and on interruptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import conf.load
from conf.schema import SourceConfig
from hlatctl.report.appendix import INCIDENTS_HEADER, SOURCES_HEADER, data_facts, environment_facts, incidents, sources
from hlatctl.report.record import Record, read_record
from tests.hlatctl.conftest import MakeRun


def _record(make_run: MakeRun, dataset: dict[str, Any], mixture: list[SourceConfig]) -> Record:
    run = make_run()
    record = read_record(run, conf.load.load(run.config))
    config = replace(record.config, data=replace(record.config.data, sources=mixture))
    return replace(record, config=config, dataset=dataset)


def test_a_mixture_is_consumed_by_its_weights(make_run: MakeRun) -> None:
    dataset = {
        "sources": [
            {"path": "/a", "documents": 1200, "text_bytes": 2 << 20, "estimated_tokens": 500_000},
            {"path": "/b", "documents": 1, "text_bytes": 1 << 20, "estimated_tokens": None},
        ]
    }
    rows = sources(_record(make_run, dataset, [SourceConfig(path="/a", weight=3), SourceConfig(path="/b")]))
    first, second = (dict(zip(SOURCES_HEADER, row, strict=True)) for row in rows)
    assert (first["source"], first["documents"], first["share"]) == ("/a", "1,200", "75.0 %")
    assert (first["consumed tokens"], first["epochs"]) == ("1.88M", "3.76")
    assert (second["tokens (estimate)"], second["epochs"]) == ("–", "–")


def test_a_corpus_that_is_not_prepared_has_no_rows(make_run: MakeRun) -> None:
    record = _record(make_run, {}, [])
    assert sources(record) == []
    assert dict(data_facts(record))["tokens in a sequence"] == "512"


def test_a_damaged_provenance_gives_the_facts_that_are_left() -> None:
    assert environment_facts({}) == []
    assert environment_facts(
        {"host": "vm", "git": {"commit": "abc", "dirty": True}, "argv": ["hlatctl", "train", "a=b c"]}
    ) == [("command", "hlatctl train 'a=b c'"), ("commit", "abc with uncommitted changes")]


def test_each_interruption_has_its_cause_loss_and_decision_and_the_end_is_none(make_run: MakeRun) -> None:
    run = make_run()
    (row,) = incidents(read_record(run, conf.load.load(run.config)))
    found = dict(zip(INCIDENTS_HEADER, row, strict=True))
    assert (found["attempt"], found["cause"]) == ("1", "killed")
    assert found["lost"] == "30 steps (15 s), 2.0 s until the next attempt"
    assert found["decision"].startswith("restart")
