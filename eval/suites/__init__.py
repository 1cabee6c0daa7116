"""The built-in suites: which tasks each holds and where their items lie. Reads package data; knows no harness.

A suite is a folder here. A task is ``<task>.yaml`` (a definition for lm-evaluation-harness) and ``<task>.jsonl`` (its
items, the split ``test``) in it; ``metadata.judge: human_eval`` in the definition marks a task whose answers are
programs. Every suite also holds the task ``validation``, the run's own held-out text.
"""

from __future__ import annotations

import difflib
import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hlatctl.run.errors import ConfigError

VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a suite.

    Args:
        definition: YAML file in the format of lm-evaluation-harness.
        items: JSON Lines.
        judge: ``harness``, or ``human_eval`` for tasks whose answers are programs.
    """

    name: str
    definition: Path
    items: Path
    judge: str


class _PlainLoader(yaml.SafeLoader):
    """Reads a task definition without importing the functions that it names."""


_PlainLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def known() -> dict[str, list[str]]:
    """Task names by suite; needs neither the harness nor torch."""
    root = _root()
    folders = sorted(p for p in root.iterdir() if p.is_dir() and any(p.glob("*.yaml")))
    return {folder.name: [VALIDATION, *sorted(p.stem for p in folder.glob("*.yaml"))] for folder in folders}


def check(suite: str, tasks: list[str]) -> list[str]:
    """The names of the tasks to run, in the suite's order; no names means all.

    Raises:
        ConfigError: unknown suite or task; the hint has the nearest name.
    """
    suites = known()
    if suite not in suites:
        raise ConfigError(f"eval.suite={suite}: unknown suite", hint=_nearest(suite, list(suites)))
    for name in tasks:
        if name not in suites[suite]:
            raise ConfigError(f"eval.tasks: {name} is no task of suite {suite}", hint=_nearest(name, suites[suite]))
    return [name for name in suites[suite] if not tasks or name in tasks]


def task(suite: str, name: str) -> Task:
    """One task of a suite, by a name that :func:`check` has passed."""
    definition = _root() / suite / f"{name}.yaml"
    metadata: dict[str, Any] = yaml.load(definition.read_text(encoding="utf-8"), Loader=_PlainLoader)["metadata"]
    items = definition.with_suffix(".jsonl")
    return Task(name=name, definition=definition, items=items, judge=metadata.get("judge", "harness"))


def _root() -> Path:
    return Path(str(importlib.resources.files(__name__)))


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
