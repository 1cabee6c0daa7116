"""Validate: check the configuration's rules, and that its corpus, tokenizer and suite are usable."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import conf.validate
from conf import environment, fingerprint, tracking
from conf.initial_weights import check_initial_weights
from conf.listing import is_url
from conf.registries import BACKENDS
from conf.schema import Config
from conf.validate import require_own_tasks
from flows.launch.base import AwayError, launcher_for
from flows.runtime.context import FlowContext, is_simulated
from flows.runtime.programs import ask, ask_about
from flows.stages import run_stage
from hlatctl import machine_checks
from hlatctl.cache.remote import unusable
from hlatctl.plan.evaluation import check_shared_devices
from hlatctl.plan.memory import check_memory
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.errors import ConfigError, DataError, DependencyError, HlatctlError, LaunchError, install
from hlatctl.run.files import private_folder
from hlatctl.run.provenance import package_versions

#: Time limit of a check in a process of its own: importing an engine from a slow disk takes minutes.
_TIMEOUT_S = 900
#: Time limit of object storage's answer.
_REMOTE_TIMEOUT_S = 120
#: The configuration of the run that this process has just created. Its first stage need not check it again, which
#: starts programs that import PyTorch or the harness.
_created_with: dict[str, Config] = {}


def validate(ctx: FlowContext) -> None:
    """Check the configuration and its inputs; report variables of this process that the configuration overrides."""

    def work() -> dict[str, Any]:
        for collision in environment.collisions(ctx.config, os.environ):
            ctx.event(
                "environment_collision",
                name=collision.name,
                configured=collision.configured,
                found=collision.present,
                message=str(collision),
            )
            ctx.message(str(collision))
        if _created_with.pop("config", None) != ctx.config:
            check(ctx.config, begun=bool(checkpoint_steps(ctx.run)))
        _check_shape(ctx)
        warning = machine_checks.skipped_code_tasks(ctx.config)
        if warning and warning not in ctx.state.warnings:
            ctx.event("warning", message=warning)
            ctx.message(warning)
        return {}

    run_stage(ctx, "validate", fingerprint.config_fingerprint(ctx.config), work)


def check(config: Config, *, begun: bool = False) -> None:
    """Check a configuration and the files that it names; for a dry run only the configuration.

    A run with a checkpoint (``begun``) doesn't need its initial weights.

    Raises:
        ConfigError, DataError, DependencyError, CheckpointError, StorageError: a rule is broken, or an input unusable.
    """
    conf.validate.validate(config)
    for each in _checks(config, begun=begun):
        each()


def check_new(config: Config, *, begun: bool = False) -> None:
    """Check a configuration like :func:`check` for a run that this process creates, and perhaps drives."""
    check(config, begun=begun)
    _created_with["config"] = config


def refused(config: Config) -> list[HlatctlError]:
    """Return why `hlatctl train` would refuse a configuration that can be planned, one error per check.

    Only the cluster's scheduler and the remote folder for checkpoints are not checked: a plan is often made elsewhere,
    and writes nothing.
    """
    errors: list[HlatctlError] = [*conf.validate.missing_to_start(config)]
    with private_folder("plan") as own:
        config = replace(config, runs_dir=os.fspath(own.path))  # a corpus in object storage is listed there
        checks = _checks(config)
        checks += partial(tracking.check_mirrors, config), partial(check_notify, config)
        for each in checks:
            try:
                each()
            except HlatctlError as error:
                errors.append(error)
    return errors


def _checks(config: Config, *, begun: bool = False) -> list[Callable[[], object]]:
    """Return the checks beyond the configuration's own rules, cheapest first."""
    rules = (check_memory, check_shared_devices, _software, _own_tasks)
    checks: list[Callable[[], object]] = [partial(check, config) for check in rules]
    if is_simulated(config):
        return checks  # corpus, weights and the suite's packages are on the cluster, and CI has none of them
    wanted, backend = config.eval, config.backend
    is_here, is_torch = config.cluster.jobs_run == "here", not backend.kind.torch_xla
    if is_here and is_torch and backend.device != "cpu":
        checks.append(partial(ask_about, "trainer.device_check", config, timeout_s=_TIMEOUT_S))
    if backend.kind.own_settings and (is_here or environment.can_train(config)):
        checks.append(partial(ask_about, backend.kind.own_settings, config, timeout_s=_TIMEOUT_S))
    if not begun:
        checks.append(partial(check_initial_weights, config))
    missing = _missing_inputs(config)
    if len(missing) > 1 or (missing and config.data.sources):  # the program names the first one, as `data.path`
        checks.append(partial(_refuse_missing, missing))
    elif config.data.inputs or config.tokenizer.path:
        checks.append(partial(ask_about, "trainer.data.prepare", config, timeout_s=_TIMEOUT_S))
    checks.append(partial(_chat, config))
    chooses = wanted.tasks or wanted.groups or wanted.items or wanted.include_path
    if wanted.enabled and (chooses or wanted.runner != "hf"):
        checks.append(partial(ask_about, "eval.check", config, timeout_s=_TIMEOUT_S))
    return checks


def _software(config: Config) -> None:
    problem = environment.software_problem(config, package_versions(environment.NEURON_PACKAGES))
    if problem:
        raise DependencyError(problem, hint="use one environment per stack; see docs/neuron.md, version matrix")
    if config.cluster.jobs_run == "here" and not importlib.util.find_spec("torch"):
        raise DependencyError("training on this machine needs PyTorch, which is not installed", hint=install("train"))
    check = BACKENDS.part(config.backend.name, "software")
    if check and config.cluster.jobs_run == "here":  # elsewhere, preflight checks the nodes' environment
        check(config)


def _missing_inputs(config: Config) -> list[str]:
    """Return the keys and paths of corpora and tokenizer that don't exist. Corpora in object storage aren't checked."""
    data, inputs = config.data, config.data.inputs
    named = {f"data.sources[{number}].path" if data.sources else "data.path": i.path for number, i in enumerate(inputs)}
    named |= {"tokenizer.path": config.tokenizer.path} if config.tokenizer.path else {}
    # A corpus of token ids can be named by the prefix of its files.
    return [
        f"{key}={path}"
        for key, path in named.items()
        if not (is_url(path) or os.path.lexists(path) or os.path.lexists(f"{path}.idx"))
    ]


def _refuse_missing(missing: list[str]) -> None:
    raise DataError(
        f"{', '.join(missing)}: no such file or folder", hint=f"correct {'these paths' if missing[1:] else 'it'}"
    )


def _own_tasks(config: Config) -> None:
    for folder in map(Path, config.eval.include_path if config.eval.enabled else ()):
        if os.path.lexists(folder):
            require_own_tasks(folder, folder)


def _chat(config: Config) -> None:
    wanted = config.eval
    if wanted.enabled and wanted.chat_template and not config.tokenizer.path:
        raise ConfigError(
            f"eval.chat_template={wanted.chat_template}: a tokenizer that hlatctl trains has no chat template",
            hint="set tokenizer.path to a tokenizer that has one, or leave out eval.chat_template",
        )


def check_notify(config: Config) -> None:
    """Check that messages can be sent, unless the run is simulated."""
    if not is_simulated(config):
        tracking.check_notify_urls(config)


def check_remote(config: Config, run_id: str) -> None:
    """Check that ``checkpoint.remote_url`` can be written and contains no run with this id."""
    url = config.checkpoint.remote_url
    if url is None or is_simulated(config):
        return
    try:
        ask("hlatctl.cache.remote", "--url", url, "--new-run", run_id, timeout_s=_REMOTE_TIMEOUT_S)
    except LaunchError as error:
        raise unusable(url, error.message) from None


def check_shape(config: Config) -> str:
    """Check with the cluster's scheduler that jobs of this shape can eventually start.

    Returns a warning if they may wait for long, or else an empty text.

    Raises:
        ConfigError: they never can.
        LaunchError: the scheduler does not answer or is not installed.
    """
    return launcher_for(config).check_limits(config)


def _check_shape(ctx: FlowContext) -> None:
    """Do the same for an existing run. A scheduler that is silent now may answer when a job is submitted."""
    if is_simulated(ctx.config) or ctx.training_lives():
        return
    try:
        if warning := check_shape(ctx.config):
            ctx.message(warning)
    except AwayError as error:
        ctx.message(f"the cluster's limits are not known: {error.message}")


def refuse_simulation(config: Config, *, hint: str, done: str = "trained") -> None:
    """Raise a ConfigError with this hint if jobs would be simulated, so that nothing would be done."""
    if is_simulated(config):
        raise ConfigError(
            f"cluster.launcher=simulated: simulates jobs and starts none, so nothing would be {done} "
            f"(cluster.name={config.cluster.name}, cluster.nodes={config.cluster.nodes})",
            hint=hint,
        )
