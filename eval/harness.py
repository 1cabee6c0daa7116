"""Tasks by lm-evaluation-harness: how it is called, and which of its numbers are the scores.

Prompts, metrics, filters and the arithmetic of groups are the harness's own. Seeds and shots are set as its command
line sets them (``--seed N --num_fewshot K``), so that both give the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from eval.model import Loaded, missing_package
from eval.plan import Figure
from eval.scores import Score, Scores
from eval.suites import Task
from hlatctl.run.errors import ConfigError, EvaluationError

#: Draws of a bootstrapped standard error, as the harness's command line; metrics that are means draw none.
_BOOTSTRAP_ITERS = 100_000
#: Tokens that the harness generates where a definition does not say how many.
_DEFAULT_GENERATED_TOKENS = 256
#: Items whose requests stand for a task's prompts in its contract.
_RENDERED_ITEMS = 2

Metrics = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """What the harness says of one task: all its metrics, and a record for each item and filter."""

    metrics: Metrics
    samples: list[dict[str, Any]]
    scores: Scores


def wrap(loaded: Loaded, *, batch_size: int) -> Any:
    """The harness's own class for transformers, around a model that is in memory already."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    quiet()
    return HFLM(
        pretrained=loaded.model, tokenizer=loaded.tokenizer, max_length=loaded.max_length, batch_size=batch_size
    )


def run(
    lm: Any,
    task: Task,
    scratch: Path,
    *,
    seed: int,
    limit: int | None = None,
    repeats: int = 1,
    generation: dict[str, Any] | None = None,
) -> TaskResult:
    """Run one task.

    Args:
        lm: the harness's model, from :mod:`eval.runners`.
        task: the task; its judge is not asked here.
        scratch: folder for the harness's caches; may be removed afterwards.
        seed: of the choice of solved examples and of sampled answers.
        limit: at most this many items.
        repeats: answers an item.
        generation: keys of the definition's ``generation_kwargs`` to replace.

    Raises:
        EvaluationError: the harness can't make sense of the task's data.
    """
    from lm_eval import evaluate

    tasks = load(task, scratch, shots=task.shots, seed=seed)
    loaded = tasks["tasks"][task.name]
    if repeats > 1:
        loaded.set_config(key="repeats", value=repeats)
    if loaded.config.output_type == "generate_until":
        loaded.set_config(key="generation_kwargs", value=_fitting(lm, loaded, generation or {}), update=True)
    _seed_all(seed)
    results = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=_BOOTSTRAP_ITERS, log_samples=True)
    metrics, samples = results["results"][task.name], results["samples"][task.name]
    plain = {
        key: value if isinstance(value, str | int) else float(value)
        for key, value in metrics.items()
        if isinstance(value, str | int | float)
    }
    return TaskResult(plain, samples, _task_scores(task, loaded, plain, samples))


def render(task: Task, scratch: Path, *, seed: int) -> dict[str, Any]:
    """What the harness will ask: its first requests as a hash, and what else of the task decides a score; JSON values.

    Raises:
        EvaluationError: the task can't be made from its data.
    """
    loaded = load(task, scratch, shots=task.shots, seed=seed)["tasks"][task.name]
    loaded.build_all_requests(limit=_RENDERED_ITEMS)
    first = [[request.request_type, *request.args] for request in loaded.instances]
    text = json.dumps(first, sort_keys=True, default=str)
    generates = loaded.config.output_type == "generate_until"
    return {
        "version": str(loaded.VERSION),
        "shots": int(loaded.get_config("num_fewshot") or 0),
        "items": len(loaded.eval_docs),
        "prompts": hashlib.sha256(text.encode()).hexdigest(),
        "generation": json.loads(json.dumps(loaded.config.generation_kwargs, default=str)) if generates else None,
    }


def load(task: Task, scratch: Path, *, shots: int | None, seed: int) -> dict[str, Any]:
    """The task in the harness's own types, with its data; as TaskManager.load gives it."""
    from lm_eval.tasks import TaskManager

    try:
        tasks: dict[str, Any] = TaskManager(include_defaults=False).load([str(write_definition(task, scratch))])
    except Exception as error:  # datasets, jinja and the definitions' own functions raise whatever bad items lead to
        where = ", ".join(map(str, task.files.values())) or "the Hugging Face hub"
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise EvaluationError(
            f"{task.name}: can't be made from {where} ({why})",
            hint="`hlatctl eval data status` says where each dataset is expected",
        ) from error
    loaded = tasks["tasks"][task.name]
    own = loaded.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        loaded.set_config(key="num_fewshot", value=shots or 0)
    loaded.set_fewshot_seed(seed=seed)
    return tasks


def figure(wanted: Figure, metrics: dict[str, Metrics]) -> Scores:
    """The scores of a group, by the harness's own aggregation of its tasks' metrics.

    Args:
        wanted: the group.
        metrics: of every task in it, as ``TaskResult.metrics``.
    """
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    members = [SimpleNamespace(task_name=name) for name in wanted.group.tasks]
    group = Group.from_config(GroupConfig(group=wanted.group.name, aggregate_metric_list=wanted.group.aggregate))
    group.get_all_tasks = lambda recursive=True: members  # their names are all that the aggregation asks of them
    found = group.aggregate(metrics)
    filters = {key.partition(",")[2]: None for key in found if "," in key and "_stderr," not in key}
    names = wanted.metrics or tuple(entry["metric"] for entry in wanted.group.aggregate)
    counts = found.get("sample_count", {})
    return _named_scores(wanted.group.name, names, found, list(filters), lambda key: int(counts[key]))


def write_definition(task: Task, scratch: Path) -> Path:
    """The task's definition, pointed at its files, as a YAML file in the scratch folder."""
    config = dict(task.config)
    if task.files:
        files = {split: str(path) for split, path in task.files.items()}
        config["dataset_kwargs"] = {"data_files": files, "cache_dir": str(scratch / "datasets")}
    path = scratch / "definitions" / f"{task.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return path


def quiet() -> None:
    """Silence the harness where it warns of what is meant here: a model given ready-made, a definition given twice."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _fitting(lm: Any, loaded: Any, generation: dict[str, Any]) -> dict[str, Any]:
    """Generation keys; at most half the context is generated, where the harness would refuse to leave no prompt."""
    asked = {**loaded.config.generation_kwargs, **generation}
    tokens = int(asked.get("max_gen_toks", _DEFAULT_GENERATED_TOKENS))
    context = getattr(lm, "max_length", None)
    return {**generation, "max_gen_toks": context // 2} if context and tokens >= context else generation


def _seed_all(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _task_scores(task: Task, loaded: Any, metrics: Metrics, samples: list[dict[str, Any]]) -> Scores:
    """The scores of a task; none of one that is judged elsewhere (metric ``bypass``)."""
    names = task.metrics or (_first_metric(loaded, metrics),)
    if names == ("bypass",) or task.judge != "harness":
        return {}
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    counts = {name: sum(sample["filter"] == name for sample in samples) for name in filters}
    return _named_scores(task.name, names, metrics, filters, lambda key: counts[key.partition(",")[2]])


def _first_metric(loaded: Any, metrics: Metrics) -> str:
    """The metric that the definition lists first; the first that there is if it lists none."""
    if not loaded.config.metric_list:
        return next(key for key in metrics if "," in key).partition(",")[0]
    metric = loaded.config.metric_list[0]["metric"]
    return metric if isinstance(metric, str) else str(metric.__name__)


def _named_scores(
    title: str, names: Sequence[str], metrics: Metrics, filters: list[str], count: Callable[[str], int]
) -> Scores:
    """The first metric that is there under the plain title, the others with the metric (or its filter) behind it."""
    scores: Scores = {}
    for name in names:
        metric, _, filter_name = name.partition(",")
        key = name if filter_name else next((k for f in filters if (k := f"{metric},{f}") in metrics), "")
        if key not in metrics:
            continue  # such as acc_norm of a task in a group that reports it where there is one
        suffix = re.sub(r"\W+", "_", filter_name or metric)
        stderr = metrics.get(f"{metric}_stderr,{key.partition(',')[2]}")
        scores[f"{title}_{suffix}" if scores else title] = Score(
            metric=metric,
            value=float(metrics[key]),
            stderr=float(stderr) if isinstance(stderr, int | float) else None,
            n=count(key),
        )
    if not scores:
        known = ", ".join(sorted(key for key in metrics if "," in key and "_stderr," not in key))
        raise ConfigError(f"eval.groups: {title} has none of the metrics {', '.join(names)}", hint=f"it has {known}")
    return scores


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
