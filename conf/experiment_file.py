"""Write a configuration as a file for ``conf/experiment``, which contains its differences from the defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from conf import folders
from conf.compose import compose


def as_experiment(overrides: Sequence[str], folder: Path, remark: str) -> str:
    """Return YAML that composes, as ``experiment=``, to the same configuration as the overrides, except ``runs_dir``.

    Args:
        folder: base of relative paths.
        remark: comment at the top of the file.

    Raises:
        ConfigError: as ``conf.compose.compose``.
    """
    config = dataclasses.asdict(compose(overrides, folder))
    with folders.using([], others=False):  # the file contains everything that differs from our defaults
        without = dataclasses.asdict(compose(["~experiment"], folder))
    differs = _difference(config, without)
    differs.pop("runs_dir", None)
    text = yaml.safe_dump(differs, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# {remark}\n{text}"


def _difference(value: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the items that differ from the other mapping or are missing in it."""
    differs: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and isinstance(other.get(key), dict):
            inner = _difference(item, other[key])
            if inner:
                differs[key] = inner
        elif key not in other or item != other[key]:
            differs[key] = item
    return differs
