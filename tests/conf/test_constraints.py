"""Bounds and choices of single fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conf.constraints import Range, violations
from conf.load import decode
from conf.schema import Config, SweepConfig
from hlatctl.run.errors import ConfigError
from tests.conf.test_validate import config_with


def first_error(config: Config) -> str:
    return str(next(violations(config)))


@pytest.mark.parametrize(
    ("bounds", "rule", "inside", "outside"),
    [
        (Range(gt=0), "greater than 0", [1, 0.1], [0, -1, float("nan")]),
        (Range(ge=0), "at least 0", [0, 1], [-0.1]),
        (Range(ge=0, lt=1), "at least 0 and below 1", [0, 0.99], [-1, 1]),
        (Range(gt=0, le=1), "greater than 0 and at most 1", [0.1, 1], [0, 1.1]),
    ],
)
def test_a_range_holds_its_bounds(bounds: Range, rule: str, inside: list[float], outside: list[float]) -> None:
    assert str(bounds) == rule
    assert [value for value in [*inside, *outside] if value in bounds] == inside


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__tokens": 0}, "train.tokens=0: must be greater than 0"),
        ({"train__max_steps": 0}, "train.max_steps=0: must be greater than 0"),
        ({"train__tokens": 2**63}, f"train.tokens={2**63}: must be at most {2**63 - 1} (2^63 - 1)"),
        ({"eval__limit": 2**63}, f"eval.limit={2**63}: must be at most {2**63 - 1} (2^63 - 1)"),
        ({"seed": -1}, f"seed=-1: must be at least 0 and at most {2**64 - 1}"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr=nan: must be a finite number"),
        ({"optimizer__weight_decay": -0.1}, "optimizer.weight_decay=-0.1: must be at least 0"),
        ({"optimizer__beta2": 1.0}, "optimizer.beta2=1.0: must be at least 0 and below 1"),
        ({"optimizer__min_lr_fraction": 1.1}, "optimizer.min_lr_fraction=1.1: must be at least 0 and at most 1"),
        ({"recovery__hang_factor": 1.0}, "recovery.hang_factor=1.0: must be greater than 1"),
        ({"eval__code__memory_bytes": 1 << 20}, "eval.code.memory_bytes=1048576: must be at least 268435456"),
        (
            {"cluster__baseline__mfu_fraction": 0.0},
            "cluster.baseline.mfu_fraction=0.0: must be greater than 0 and at most 1",
        ),
        (
            {"cluster__hardware__tensor_parallel_sizes": [8, 0]},
            "cluster.hardware.tensor_parallel_sizes[1]=0: must be greater than 0",
        ),
        (
            {"data__sources": [{"path": "a", "weight": float("inf")}]},
            "data.sources[0].weight=inf: must be a finite number",
        ),
        ({"eval__groups": {"math": {"shots": -1}}}, "eval.groups.math.shots=-1: must be at least 0"),
        (
            {"eval__groups": {"math": {"judge": "me"}}},
            "eval.groups.math.judge=me: not known\nhint: use one of: harness, human_eval",
        ),
        ({"backend__env": {"N": 2**63}}, f"backend.env.N={2**63}: must be at most {2**63 - 1} (2^63 - 1)"),
        (
            {"precision__name": "fp9"},
            "precision.name=fp9: not known\nhint: use one of: fp32, mixed, fp8, bf16_sr, bf16",
        ),
    ],
)
def test_a_value_outside_of_its_field_s_bounds_or_choices_is_named(changes: dict[str, Any], message: str) -> None:
    assert first_error(config_with(**changes)).startswith(message)


def test_a_value_out_of_bounds_is_refused_with_its_default() -> None:
    assert first_error(config_with(cluster__nodes=0)).splitlines() == [
        "cluster.nodes=0: must be greater than 0",
        "hint: the default is cluster.nodes=1",
    ]


def test_values_at_the_bounds_pass() -> None:
    config = config_with(seed=2**64 - 1, optimizer__min_lr_fraction=1.0, recovery__backoff_s=0.0, eval__limit=2**63 - 1)
    assert list(violations(config)) == []


def test_every_violation_is_found_in_the_order_of_the_fields() -> None:
    config = config_with(seed=-1, model__num_layers=0, optimizer__decay="none", optimizer__lr=0.0)
    keys = [error.message.split("=")[0] for error in violations(config)]
    assert keys == ["seed", "model.num_layers", "optimizer.lr", "optimizer.decay"]


def test_settings_of_a_sweep_are_checked_in_the_same_way() -> None:
    assert list(violations(SweepConfig(), "sweep.")) == []
    assert next(violations(SweepConfig(rungs=0), "sweep.")).message == "sweep.rungs=0: must be greater than 0"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "eval.batch_size=0: must be greater than 0\nhint: the default is eval.batch_size=16"),
        ("many", "eval.batch_size=many: not known\nhint: use one of: auto"),
    ],
)
def test_a_value_of_a_union_has_the_rules_of_its_kind(value: Any, message: str) -> None:
    assert first_error(config_with(eval__batch_size=value)) == message
    assert not list(violations(config_with(eval__batch_size="auto")))


def test_a_union_is_read_by_the_kind_of_its_value() -> None:
    values = dataclasses.asdict(config_with(eval__batch_size="auto"))
    assert decode(values).eval.batch_size == "auto"
    values["eval"]["batch_size"] = 3
    assert decode(values).eval.batch_size == 3
    values["eval"]["batch_size"] = 1.5
    with pytest.raises(ConfigError, match=r"eval.batch_size=1.5: must be a whole number"):
        decode(values)
