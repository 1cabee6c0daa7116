"""A configuration as a file for ``conf/experiment``: what it differs in from one without an experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from conf.compose import compose


def as_experiment(overrides: Sequence[str], folder: Path, remark: str) -> str:
    """YAML that composes, as ``experiment=``, to what the overrides compose to; the runs folder is left open.

    Args:
        overrides: of the configuration.
        folder: that relative paths begin in.
        remark: a line at the top.

    Raises:
        ConfigError: as ``conf.compose.compose``.
    """
    config = dataclasses.asdict(compose(overrides, folder))
    without = dataclasses.asdict(compose(["~experiment"], folder))
    differs = _difference(config, without)
    differs.pop("runs_dir", None)
    text = yaml.safe_dump(differs, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# {remark}\n{text}"


def _difference(value: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What is another, and what the other lacks."""
    differs: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and isinstance(other.get(key), dict):
            inner = _difference(item, other[key])
            if inner:
                differs[key] = inner
        elif key not in other or item != other[key]:
            differs[key] = item
    return differs
