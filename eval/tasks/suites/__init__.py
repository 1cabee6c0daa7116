"""The built-in suites and their tasks; needs no harness.

A built-in suite is a folder here. A task consists of ``<task>.yaml`` (a definition for lm-evaluation-harness) and
``<task>.jsonl`` (its items, the split ``test``); ``metadata.judge: human_eval`` in the definition marks a task whose
answers are programs. Other suites are lists of the harness's tasks in ``conf/eval`` (see ``eval.tasks.plan``).
"""

from __future__ import annotations

import importlib.resources
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from conf.load import SAFE_LOADER

VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How prompts are put into a conversation.

    Args:
        template: the tokenizer's chat template: True, or the name of one of several; False for plain text.
        system_prompt: the first message; None for none.
        multiturn: put each solved example into a separate turn.
    """

    template: bool | str = False
    system_prompt: str | None = None
    multiturn: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the harness's ``evaluate``."""
        return {
            "system_instruction": self.system_prompt,
            "apply_chat_template": self.template,
            "fewshot_as_multiturn": self.multiturn,
        }


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task, ready to run.

    Args:
        definition: YAML file in the format of lm-evaluation-harness.
        config: the definition for the harness, usually ``include`` and some changed keys.
        files: the items by split, JSON Lines, the evaluated split first; if empty, the definition's own dataset.
        judge: ``harness``, or ``human_eval`` or ``mbpp`` for tasks whose answers are programs.
        shots: solved examples before each question; None for the definition's number.
        metrics: the harness's metrics to report, the first under the task's name; if empty, the definition's first.
        generation: replaces keys of the definition's ``generation_kwargs``.
        chosen: positions of the items to evaluate, in order; if empty, the first ``eval.limit``.
        fewshot_seed: selects the solved examples; None for the evaluation's seed.
        chat: how prompts are put into a conversation; None for plain text.
        own: the folder of ``eval.include_path`` that the definition is from; None for any other.
    """

    name: str
    definition: Path
    config: dict[str, Any]
    files: dict[str, Path] = field(default_factory=dict)
    judge: str = "harness"
    shots: int | None = None
    metrics: tuple[str, ...] = ()
    generation: dict[str, Any] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()
    fewshot_seed: int | None = None
    chat: Chat | None = None
    own: Path | None = None

    @property
    def is_code(self) -> bool:
        """Whether its answers are programs."""
        return self.judge != "harness"

    @property
    def items(self) -> Path:
        """The file of the evaluated split."""
        return next(iter(self.files.values()))

    def special(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults and are in no other field of a contract, as JSON values."""
        fields: dict[str, Any] = {}
        if self.chosen:
            fields["chosen"] = list(self.chosen)
        if self.chat:
            fields["chat"] = asdict(self.chat)
        if self.own:
            fields["own"] = True
        return fields


class _PlainLoader(SAFE_LOADER):  # type: ignore[misc]
    """Loads a task definition without importing the functions that it names."""


_PlainLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def known() -> dict[str, list[str]]:
    """Return the task names by suite."""
    root = _root()
    folders = sorted(p for p in root.iterdir() if p.is_dir() and any(p.glob("*.yaml")))
    return {folder.name: [VALIDATION, *sorted(p.stem for p in folder.glob("*.yaml"))] for folder in folders}


def task(suite: str, name: str) -> Task:
    """Return a task of a built-in suite."""
    definition = _root() / suite / f"{name}.yaml"
    metadata: dict[str, Any] = yaml.load(definition.read_text(encoding="utf-8"), Loader=_PlainLoader)["metadata"]
    config = {"include": str(definition), "task": name}
    return Task(
        name=name,
        definition=definition,
        config=config,
        files={"test": definition.with_suffix(".jsonl")},
        judge=metadata.get("judge", "harness"),
    )


def _root() -> Path:
    return Path(str(importlib.resources.files(__name__)))
