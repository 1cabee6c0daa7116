"""Run tasks with lm-evaluation-harness, and select the scores from its metrics.

Prompts, metrics, filters and the aggregation of groups are the harness's own. Seeds and shots are set as on its command
line (``--seed N --num_fewshot K``), so that both give the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from eval import normalised
from eval.scores import Score, Scores
from eval.serving.model import Loaded, missing_package
from eval.serving.pool import Pool
from eval.tasks import catalog
from eval.tasks.plan import Figure
from eval.tasks.suites import Task
from hlatctl.run.errors import ConfigError, DataError, EvaluationError, first_line
from hlatctl.run.evaluations import BITS_PER_BYTE

#: Samples for a bootstrapped standard error, as in the harness's command line; means need none.
_BOOTSTRAP_ITERS = 100_000
#: Tokens that the harness generates if a definition has no ``max_gen_toks``.
DEFAULT_GENERATED_TOKENS = 256
#: Items whose requests represent a task's prompts in the contract.
_RENDERED_ITEMS = 2
#: Compiled templates in memory; a task has at most a few.
_TEMPLATES = 64

Metrics = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """A task's result: all metrics, one sample per item and filter, and the scores."""

    metrics: Metrics
    samples: list[dict[str, Any]]
    scores: Scores


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The requests of a task, as far as its contract records them.

    Args:
        output_type: the harness's name for the kind of its requests, or ``core``.
        fields: a hash of the first requests, and the settings that decide its score, as JSON values.
        draws_shots: its solved examples are drawn with the seed.
    """

    output_type: str
    fields: dict[str, Any]
    draws_shots: bool


def wrap(
    loaded: Loaded,
    *,
    batch_size: int | Literal["auto"],
    processes: int = 1,
    most_bytes: float | None = None,
    pool: Pool | None = None,
    share_prefixes: bool = False,
) -> Any:
    """Return the harness's model for transformers.

    Args:
        most_bytes: maximum memory of an ``auto`` batch.
        share_prefixes: compute tokens once with which several sequences of a batch begin.
    """
    try:
        from eval.serving.hugging_face import HuggingFace, Replicas
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    quiet()
    if pool:
        return Replicas(loaded, pool, batch_size=batch_size, share_prefixes=share_prefixes)
    return HuggingFace(
        loaded, batch_size=batch_size, processes=processes, most_bytes=most_bytes, share_prefixes=share_prefixes
    )


def run(
    lm: Any,
    task: Task,
    scratch: Path,
    *,
    seed: int,
    limit: float | None = None,
    repeats: int = 1,
    generation: dict[str, Any] | None = None,
    is_trained_here: bool = True,
) -> TaskResult:
    """Run one task; generated programs are not run.

    Args:
        lm: the harness's model, from :mod:`eval.serving.runners`.
        scratch: folder for the harness's caches; may be removed afterwards.
        seed: selects solved examples and sampled answers.
        limit: at most this many items, or a fraction of them; a task's chosen items come first.
        repeats: answers per item.
        generation: replaces keys of the definition's ``generation_kwargs``.
        is_trained_here: the model is a run's, not from elsewhere.
    """
    import torch
    from lm_eval import evaluate

    tasks = load(task, scratch, shots=task.shots, seed=seed)
    loaded = tasks["tasks"][task.name]
    if hasattr(loaded, "read_with"):
        loaded.read_with(lm, is_trained_here=is_trained_here)
    if repeats > 1:
        loaded.set_config(key="repeats", value=repeats)
    if loaded.config.output_type == "generate_until":
        loaded.set_config(key="generation_kwargs", value=_fitting(lm, loaded, generation or {}), update=True)
    _seed(seed)
    torch.manual_seed(seed)
    with catalog.running_own_code(task, everything=False):
        results = evaluate(
            lm=lm,
            task_dict=tasks,
            limit=None if task.chosen else limit,
            samples={task.name: list(task.chosen)} if task.chosen else None,
            bootstrap_iters=_BOOTSTRAP_ITERS,
            log_samples=True,
            **(task.chat.arguments() if task.chat else {}),
        )
    metrics, samples = results["results"][task.name], results["samples"][task.name]
    simple = {key: value for key, value in metrics.items() if isinstance(value, str | int | float)}
    plain = {key: value if isinstance(value, str | int) else float(value) for key, value in simple.items()}
    plain = normalised.add(lm, loaded, plain, samples, has_chat=bool(task.chat and task.chat.template))
    return TaskResult(plain, samples, _task_scores(task, loaded, plain, samples))


def render(task: Task, scratch: Path, *, seed: int) -> Asked:
    """Return a task's requests as its contract records them, from the first ones."""
    loaded = load(task, scratch, shots=task.shots, seed=seed)["tasks"][task.name]
    before = _shots_state(loaded)
    with catalog.running_own_code(task):
        loaded.build_all_requests(limit=_RENDERED_ITEMS)
    first = [[request.request_type, *request.args] for request in loaded.instances]
    text = json.dumps(first, sort_keys=True, default=str)
    generates = loaded.config.output_type == "generate_until"
    fields = {
        "version": str(loaded.VERSION),
        "shots": int(loaded.get_config("num_fewshot") or 0),
        "items": len(loaded.eval_docs),
        "generation": json.loads(json.dumps(loaded.config.generation_kwargs, default=str)) if generates else None,
        "prompts": hashlib.sha256(text.encode()).hexdigest(),  # last: a refusal names the cause before it
    }
    kind = getattr(loaded, "scored_as", loaded.config.output_type)
    return Asked(output_type=str(kind), fields=fields, draws_shots=_shots_state(loaded) != before)


def _shots_state(loaded: Any) -> list[Any]:
    generators = (loaded.fewshot_rnd, getattr(getattr(loaded, "sampler", None), "rnd", None))
    return [generator.getstate() for generator in generators if generator]


def asked(task: Task, loaded: Any, limit: float | None) -> range | tuple[int, ...]:
    """Return the positions of the items that :func:`run` evaluates; a ``limit`` below 1 is a fraction."""
    from lm_eval.evaluator_utils import get_sample_size

    return task.chosen or range(len(loaded.eval_docs))[: get_sample_size(loaded, limit)]


def load(task: Task, scratch: Path, *, shots: int | None, seed: int) -> dict[str, Any]:
    """Return the task with its data in the harness's types, as TaskManager.load does."""
    from lm_eval.tasks import TaskManager

    _compile_templates_once()
    _seed(seed)  # functions of definitions shuffle choices while the data is read
    try:
        with catalog.running_own_code(task):
            tasks: dict[str, Any] = TaskManager(include_defaults=False).load([str(write_definition(task, scratch))])
    except (EvaluationError, DataError):  # from the user's definition, or from a task that reads its file itself
        raise
    except Exception as error:  # datasets, jinja and functions of definitions raise all kinds of errors for bad items
        where = ", ".join(map(str, task.files.values())) or "the Hugging Face hub"
        why = f"{type(error).__name__}: {first_line(error)}"
        raise EvaluationError(
            f"{task.name}: can't be loaded from {where} ({why})",
            hint="`hlatctl eval data status` lists where each dataset is expected",
        ) from error
    loaded = tasks["tasks"][task.name]
    own = loaded.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        loaded.set_config(key="num_fewshot", value=shots or 0)
    loaded.set_fewshot_seed(seed=seed if task.fewshot_seed is None else task.fewshot_seed)
    if task.generation:
        loaded.set_config(key="generation_kwargs", value=task.generation, update=True)
    with catalog.running_own_code(task):
        items = len(loaded.eval_docs) if task.chosen else 0
    _check_chosen(task, items)
    return tasks


def figure(wanted: Figure, metrics: dict[str, Metrics]) -> Scores:
    """Return the scores of a group from the metrics of its tasks, by the harness's own aggregation."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    members = [SimpleNamespace(task_name=name) for name in wanted.group.tasks]
    aggregate = [*wanted.group.aggregate, *_also_aggregated(wanted, metrics)]
    group = Group.from_config(GroupConfig(group=wanted.group.name, aggregate_metric_list=aggregate))
    group.get_all_tasks = lambda recursive=True: members  # the aggregation reads only their names
    combined = group.aggregate(metrics)
    filters = {key.partition(",")[2]: None for key in combined if "," in key and "_stderr," not in key}
    names = wanted.metrics or tuple(entry["metric"] for entry in wanted.group.aggregate)
    counts = combined.get("sample_count", {})
    scores = _named_scores(wanted.group.name, names, combined, list(filters), lambda key: int(counts[key]))
    return scores | _bits(wanted.group.name, combined, int(counts.get(normalised.KEY, 0)))


def _also_aggregated(wanted: Figure, metrics: dict[str, Metrics]) -> list[dict[str, Any]]:
    """Return scores of guessing and bits per byte, aggregated like a group's own metrics if every task has them."""
    of_tasks = [metrics[name] for name in wanted.group.tasks if name in metrics]
    own = wanted.group.aggregate
    found = [{**entry, "metric": BITS_PER_BYTE, "filter_list": ["none"]} for entry in own[:1]]
    found += [{**entry, "metric": f"{entry['metric']}_chance"} for entry in own]
    return [
        entry for entry in found if all(any(key.startswith(f"{entry['metric']},") for key in each) for each in of_tasks)
    ]


def write_definition(task: Task, scratch: Path) -> Path:
    """Write the task's definition, with its files, as YAML to the scratch folder and return the path."""
    config = dict(task.config)
    if task.files:
        files = {split: str(path) for split, path in task.files.items()}
        config["dataset_kwargs"] = {
            **config.get("dataset_kwargs", {}),
            "data_files": files,
            "cache_dir": str(scratch / "datasets"),
        }
    path = scratch / "definitions" / f"{task.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return path


def quiet() -> None:
    """Silence the harness's warnings about things done on purpose: a loaded model, a definition given twice."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _compile_templates_once() -> None:
    """Let the harness compile each template once; it does so for every example of every prompt, which takes 1 ms."""
    from lm_eval import utils

    if not hasattr(utils.env.from_string, "cache_info"):
        utils.env.from_string = lru_cache(maxsize=_TEMPLATES)(utils.env.from_string)


def _fitting(lm: Any, loaded: Any, generation: dict[str, Any]) -> dict[str, Any]:
    """Return the generation keys; half the context is generated if the definition leaves no room for a prompt."""
    asked = {**loaded.config.generation_kwargs, **generation}
    tokens = int(asked.get("max_gen_toks", DEFAULT_GENERATED_TOKENS))
    context = getattr(lm, "max_length", None)
    return {**generation, "max_gen_toks": context // 2} if context and tokens >= context else generation


def _check_chosen(task: Task, items: int) -> None:
    if task.chosen and task.chosen[-1] >= items:
        raise ConfigError(
            f"eval.items.{task.name}: item {task.chosen[-1]} does not exist",
            hint=f"{task.name} has {items} items, from 0 to {items - 1}",
        )


def _seed(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _task_scores(task: Task, loaded: Any, metrics: Metrics, samples: list[dict[str, Any]]) -> Scores:
    """Return the scores of a task; only the bits per byte if the others are computed elsewhere (metric ``bypass``)."""
    names = task.metrics or (_first_metric(loaded, metrics),)
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    bits = _bits(task.name, metrics, sum(BITS_PER_BYTE in each["metrics"] for each in samples) // len(filters))
    if names == ("bypass",) or task.is_code:
        return bits
    counts = {name: sum(sample["filter"] == name for sample in samples) for name in filters}
    return _named_scores(task.name, names, metrics, filters, lambda key: counts[key.partition(",")[2]]) | bits


def _bits(title: str, metrics: Metrics, n: int) -> Scores:
    if normalised.KEY not in metrics or not n:
        return {}
    return {f"{title}_bpb": _score(metrics, normalised.KEY, n)}


def _first_metric(loaded: Any, metrics: Metrics) -> str:
    if not loaded.config.metric_list:
        return next(key for key in metrics if "," in key).partition(",")[0]
    metric = loaded.config.metric_list[0]["metric"]
    return metric if isinstance(metric, str) else str(metric.__name__)


def _named_scores(
    title: str, names: Sequence[str], metrics: Metrics, filters: list[str], count: Callable[[str], int]
) -> Scores:
    """Return the first present metric under the title, and the others with the metric or its filter appended."""
    scores: Scores = {}
    for name in names:
        metric, _, filter_name = name.partition(",")
        key = name if filter_name else next((k for f in filters if (k := f"{metric},{f}") in metrics), "")
        if key not in metrics:
            continue  # such as acc_norm, which not every task of a group has
        suffix = re.sub(r"\W+", "_", filter_name or metric)
        scores[f"{title}_{suffix}" if scores else title] = _score(metrics, key, count(key))
    if not scores:
        known = ", ".join(sorted(key for key in metrics if "," in key and "_stderr," not in key))
        raise ConfigError(f"eval.groups: {title} has none of the metrics {', '.join(names)}", hint=f"it has {known}")
    return scores


def _score(metrics: Metrics, key: str, n: int) -> Score:
    metric, _, filter_name = key.partition(",")
    stderr, chance = metrics.get(f"{metric}_stderr,{filter_name}"), metrics.get(normalised.chance_key(key))
    return Score(
        metric=metric,
        value=float(metrics[key]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        n=n,
        chance=float(chance) if isinstance(chance, int | float) else None,
    )
