"""The table of the keys that may change in a run that exists."""

from __future__ import annotations

import pytest

from conf.amendable import LIVE, ROWS, begins, row_of, with_resume
from conf.amendments import fields_of
from conf.schema import Config


def test_every_key_of_the_schema_has_a_row_and_every_row_a_key() -> None:
    keys = list(fields_of(Config()))
    used = {row_of(key).keys for key in keys}
    assert used == {row.keys for row in ROWS}
    assert len({row.keys for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("key", "when"),
    [
        ("model.hidden_size", "never"),
        ("seed", "never"),
        ("train.seq_len", "never"),
        ("train.tokens", "next_attempt"),
        ("optimizer.lr", "next_attempt"),
        ("cluster.nodes", "next_attempt"),
        ("cluster.slurm.partition", "next_attempt"),
        ("cluster.hardware.memory_bytes", "at_once"),
        ("checkpoint.every_steps", "at_once"),
        ("checkpoint.mode", "next_attempt"),
        ("eval.cluster.partition", "at_once"),
        ("recovery.hang_floor_s", "at_once"),
        ("tracking.mlflow_uri", "next_driver"),
    ],
)
def test_the_most_special_row_of_a_key_counts(key: str, when: str) -> None:
    assert row_of(key).when == when


def test_an_amendment_begins_as_late_as_its_latest_key() -> None:
    assert begins(["checkpoint.keep", "eval.limit"]) == "at_once"
    assert begins(["checkpoint.keep", "optimizer.lr"]) == "next_attempt"
    assert begins(["optimizer.lr", "seed"]) == "never"


def test_what_the_trainer_reads_while_it_trains_changes_at_once() -> None:
    assert {row_of(key).when for key in LIVE} == {"at_once"}
    assert set(LIVE) <= set(fields_of(Config()))


@pytest.mark.parametrize(
    ("hint", "complete"),
    [
        ("", "`hlatctl resume r7` continues the run"),
        ("see train.log", "see train.log"),
        ("raise data.validation_fraction", "raise data.validation_fraction"),
        ("lower optimizer.lr, or wait", "lower optimizer.lr, or wait: `hlatctl resume r7 optimizer.lr=VALUE`"),
        ("set backend.device=cpu", "set backend.device=cpu: `hlatctl resume r7 backend.device=VALUE`"),
        ("free space, then `hlatctl resume r7`", "free space, then `hlatctl resume r7`"),
    ],
)
def test_a_hint_that_names_a_key_leads_to_the_command_that_changes_it(hint: str, complete: str) -> None:
    assert with_resume(hint, "r7") == complete
