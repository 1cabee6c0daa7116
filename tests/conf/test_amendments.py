"""Which keys of a run may change, which amendments an attempt begins with, and what they change."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from conf.amendments import (
    LIVE,
    RULES,
    beginning_at,
    begins,
    changes_between,
    ends_after,
    fields_of,
    live,
    live_values,
    new_values,
    rule_of,
    waiting,
    with_changes,
    with_resume,
)
from conf.schema import BackendConfig, Config, EvalConfig, EvalGroupConfig, OptimizerConfig
from hlatctl.run.errors import ConfigError
from hlatctl.run.state import AmendmentState


def test_every_key_of_the_schema_has_a_row_and_every_row_a_key() -> None:
    keys = list(fields_of(Config()))
    used = {rule_of(key).keys for key in keys}
    assert used == {row.keys for row in RULES}
    assert len({row.keys for row in RULES}) == len(RULES)


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
    assert rule_of(key).when == when


def test_an_amendment_begins_as_late_as_its_latest_key() -> None:
    assert begins(["checkpoint.keep", "eval.limit"]) == "at_once"
    assert begins(["checkpoint.keep", "optimizer.lr"]) == "next_attempt"
    assert begins(["optimizer.lr", "seed"]) == "never"


def test_what_the_trainer_reads_while_it_trains_changes_at_once() -> None:
    assert {rule_of(key).when for key in LIVE} == {"at_once"}
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


LR, KEEP = {"optimizer.lr": [3e-4, 1e-4]}, {"checkpoint.keep": [3, 5]}


def amendments(*given: tuple[dict[str, Any], int | None]) -> list[AmendmentState]:
    return [AmendmentState(n, 0.0, changes, at_step=at) for n, (changes, at) in enumerate(given, start=1)]


def test_changes_survive_the_journal_and_lead_from_one_configuration_to_the_other() -> None:
    before = Config(backend=BackendConfig(env={"A": "1", "B": None}))
    groups = {"core": EvalGroupConfig(tasks=["piqa"], shots=2)}
    after = dataclasses.replace(
        before,
        optimizer=OptimizerConfig(lr=1e-5, warmup_tokens=10),
        backend=BackendConfig(env={"A": "2"}),
        eval=EvalConfig(groups=groups, limit=3),
    )
    changes = json.loads(json.dumps(changes_between(before, after)))
    assert set(changes) == {"optimizer.lr", "optimizer.warmup_tokens", "backend.env", "eval.groups", "eval.limit"}
    assert changes["optimizer.lr"] == [3e-4, 1e-5]
    assert with_changes(before, {key: new for key, (_, new) in changes.items()}) == after
    assert with_changes(after, {key: old for key, (old, _) in changes.items()}) == before


def test_a_damaged_change_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"train\.max_steps='x': must be a whole number"):
        with_changes(Config(), {"train.max_steps": "x"})


def test_the_keys_of_amendments_are_the_fields_of_the_schema() -> None:
    fields = fields_of(Config(backend=BackendConfig(env={"A": "1"})))
    assert fields["backend.env"] == {"A": "1"}
    assert "eval.code.workers" in fields


def test_an_amendment_without_a_step_begins_with_the_next_attempt() -> None:
    assert beginning_at(amendments((LR, None), (KEEP, None)), 0) == 2
    assert beginning_at([], 10) == 0


def test_an_amendment_waits_for_its_step_and_holds_back_later_ones() -> None:
    given = amendments((KEEP, None), (LR, 50), (LR, None))
    assert beginning_at(given, 49) == 1
    assert [a.number for a in waiting(given, 49)] == [2, 3]
    assert beginning_at(given, 50) == 3


def test_one_that_begins_now_takes_along_those_before_it() -> None:
    given = amendments((LR, 50), ({}, 10))
    assert beginning_at(given, 10) == 2
    assert ends_after(given, 0) == 10


def test_one_that_began_stays_after_a_return_to_an_earlier_checkpoint() -> None:
    given = amendments((LR, 50))
    given[0].applied_step = 50
    assert beginning_at(given, 20) == 1


def test_an_attempt_ends_for_the_first_step_that_an_amendment_waits_for() -> None:
    given = amendments((LR, 50), (KEEP, None), (LR, 70))
    assert ends_after(given, 0) == 50
    assert ends_after(given, 2) == 70
    assert ends_after(given, 3) is None
    assert ends_after(amendments((LR, None)), 0) is None


def test_what_changes_at_once_overtakes_an_amendment_that_waits() -> None:
    given = amendments((LR, 50), (KEEP, None), ({"eval.limit": [None, 4]}, None))
    given[1].applied_step = 7
    assert beginning_at(given, 7) == 0
    assert [a.number for a in live(given, 0)] == [2, 3]
    assert new_values(live(given, 0)) == {"checkpoint.keep": 5, "eval.limit": 4}
    assert live_values(live(given, 0)) == {"checkpoint.keep": 5}
