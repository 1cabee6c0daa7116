"""Tasks by lm-evaluation-harness: the only importer of lm_eval.

Prompts, metrics and filters are the harness's own, as the task's definition asks; here the definition is pointed at
its items on this machine, and the primary metric is taken from what the harness returns: the first of
``metric_list``, under the first filter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.model import Loaded, missing_package
from eval.scores import Score, Scores
from eval.suites import Task

#: Draws of a bootstrapped standard error; metrics that are means have a closed form and draw none.
_BOOTSTRAP_ITERS = 1000


@dataclass(frozen=True)
class TaskResult:
    """What the harness says of one task: all its metrics, and a record for each item and filter."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]
    scores: Scores


def wrap(loaded: Loaded, *, batch_size: int) -> Any:
    """The harness's own model class around a loaded model."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    # It warns that the model is given ready-made, which is meant.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
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
        lm: the harness's model, from :func:`wrap`.
        task: the task; its judge is not asked here.
        scratch: folder for the harness's caches; may be removed afterwards.
        seed: of sampled answers.
        limit: at most this many items.
        repeats: answers an item.
        generation: keys of the definition's ``generation_kwargs`` to replace.
    """
    import torch
    from lm_eval import evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_defaults=False).load([str(_definition(task, scratch))])
    loaded = tasks["tasks"][task.name]
    loaded.set_fewshot_seed(seed=seed)
    loaded.set_config(key="repeats", value=repeats)
    if generation:
        loaded.set_config(key="generation_kwargs", value=generation, update=True)
    torch.manual_seed(seed)
    # A single item has no standard error, and the harness would divide by zero for it.
    iters = 0 if limit == 1 else _BOOTSTRAP_ITERS
    results = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=iters, log_samples=True)
    metrics, samples = results["results"][task.name], results["samples"][task.name]
    return TaskResult(metrics, samples, _primary_score(loaded, metrics, samples))


def _definition(task: Task, scratch: Path) -> Path:
    """The task's definition with its items on this machine, as a file in the scratch folder."""
    cache = scratch / "datasets"
    here = {
        "include": str(task.definition),
        "task": task.name,
        "dataset_kwargs": {"data_files": {"test": str(task.items)}, "cache_dir": str(cache)},
    }
    path = scratch / f"{task.name}.yaml"
    path.write_text(yaml.safe_dump(here), encoding="utf-8")
    return path


def _primary_score(task: Any, metrics: dict[str, Any], samples: list[dict[str, Any]]) -> Scores:
    """The task's primary metric under the task's name; nothing for a task judged elsewhere (metric ``bypass``)."""
    metric = task.config.metric_list[0]["metric"]
    if metric == "bypass":
        return {}
    first_filter = samples[0]["filter"]
    stderr = metrics.get(f"{metric}_stderr,{first_filter}")
    score = Score(
        metric=metric,
        value=float(metrics[f"{metric},{first_filter}"]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        n=sum(sample["filter"] == first_filter for sample in samples),
    )
    return {task.config.task: score}
