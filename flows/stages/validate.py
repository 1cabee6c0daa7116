"""Validate: check the configuration's rules, and that its corpus, tokenizer and suite are usable."""

from __future__ import annotations

import os
from typing import Any

import conf.validate
from conf import environment, fingerprint
from conf.initial_weights import check_initial_weights
from conf.schema import Config
from flows.launch.kubernetes import limits as kubernetes_limits
from flows.launch.kubernetes.api import ApiAwayError
from flows.launch.slurm import limits
from flows.launch.slurm.commands import SchedulerAwayError
from flows.runtime.ask import ask, ask_about
from flows.runtime.context import FlowContext, is_mock
from flows.stages import run_stage
from hlatctl import machine_checks
from hlatctl.cache.mirror import unusable
from hlatctl.plan.memory import check_memory
from hlatctl.run.errors import ConfigError, DependencyError, LaunchError
from hlatctl.run.manifest import checkpoint_steps
from hlatctl.run.provenance import package_versions

_TIMEOUT_S = 120


def validate(ctx: FlowContext) -> None:
    """Check the configuration and its inputs; report variables of this process that it overrides."""

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
        check(ctx.config, begun=bool(checkpoint_steps(ctx.run)))
        _check_shape(ctx)
        warning = machine_checks.skipped_code_tasks(ctx.config)
        if warning and warning not in ctx.state.warnings:
            ctx.event("warning", message=warning)
            ctx.message(warning)
        return {}

    run_stage(ctx, "validate", fingerprint.config_fingerprint(ctx.config), work)


def check(config: Config, *, begun: bool = False) -> None:
    """Check a configuration and the files that it names; of a dry run only the configuration.

    Args:
        config: of a run.
        begun: the run has a checkpoint, so it doesn't need its initial weights.

    Raises:
        ConfigError: a rule is broken, the devices' memory is too small, the suite has no task of that name, or the
            initial weights belong to another model.
        DataError: the corpus or the tokenizer is missing, empty or unreadable; a dataset of the suite is missing.
        DependencyError: a package of the suite or of its runner is missing, or the Neuron stack doesn't match.
        CheckpointError: the initial weights are incomplete.
    """
    conf.validate.validate(config)
    check_memory(config)
    problem = environment.software_problem(config, package_versions(environment.NEURON_PACKAGES))
    if problem:
        raise DependencyError(problem, hint="use one environment per stack; see docs/neuron.md, version matrix")
    if is_mock(config):
        return  # corpus, weights and the suite's packages are on the cluster, and CI has none of them
    backend = config.backend
    if config.cluster.launcher == "local" and backend.device != "cpu" and backend.name == "torch_native":
        ask_about("trainer.device_check", config, timeout_s=_TIMEOUT_S)
    if not begun:
        check_initial_weights(config)
    if config.data.inputs or config.tokenizer.path:
        ask_about("trainer.data.check", config, timeout_s=_TIMEOUT_S)
    wanted = config.eval
    chooses = wanted.tasks or wanted.groups or wanted.items or wanted.include_path
    if wanted.enabled and wanted.chat_template and not config.tokenizer.path:
        raise ConfigError(
            f"eval.chat_template={wanted.chat_template}: a tokenizer that hlatctl trains has no chat template",
            hint="set tokenizer.path to a tokenizer that has one, or leave out eval.chat_template",
        )
    if wanted.enabled and (chooses or wanted.runner != "hf"):
        ask_about("eval.check", config, timeout_s=_TIMEOUT_S)


def check_mirror(config: Config, run_id: str) -> None:
    """Check that ``checkpoint.mirror_url`` can be written, and has no run of this id.

    Raises:
        StorageError: it can't be written.
        DependencyError: the package for this kind of URL is missing.
        RunExistsError: it has checkpoints of a run with this id.
    """
    url = config.checkpoint.mirror_url
    if url is None or is_mock(config):
        return
    try:
        ask("hlatctl.cache.mirror", "--url", url, "--new-run", run_id, timeout_s=_TIMEOUT_S)
    except LaunchError as error:
        raise unusable(url, error.message) from None


def check_shape(config: Config) -> str:
    """Check with the cluster's scheduler that jobs of this shape can start some day.

    Returns:
        A warning: why jobs may wait for long; empty if there is none.

    Raises:
        ConfigError: they never can.
        LaunchError: the scheduler does not answer, or is not here.
    """
    if config.cluster.launcher == "kubernetes":
        return kubernetes_limits.check(config.cluster)
    if config.cluster.launcher != "slurm":
        return ""
    try:
        limits.check(config.cluster)
        if config.eval.enabled:
            limits.check_evaluations(config)
    except SchedulerAwayError as error:
        raise SchedulerAwayError(error.message, hint="see `scontrol ping`, and try again later") from None
    return ""


def _check_shape(ctx: FlowContext) -> None:
    """The same for a run that exists. A scheduler that does not answer now may answer when a job is submitted."""
    if is_mock(ctx.config) or ctx.training_lives():
        return
    try:
        if warning := check_shape(ctx.config):
            ctx.message(warning)
    except SchedulerAwayError as error:
        ctx.message(f"the limits of the partition are not known: {error.message}")
    except ApiAwayError as error:
        ctx.message(f"the cluster's nodes are not known: {error.message}")


def refuse_simulation(config: Config, *, hint: str, done: str = "trained") -> None:
    """Refuse a configuration that can only be simulated, unless a dry run was asked for.

    Args:
        config: the composed configuration.
        hint: what to do instead.
        done: the work that would not be done.

    Raises:
        ConfigError: its jobs would be simulated.
    """
    if is_mock(config):
        raise ConfigError(
            f"cluster.launcher=mock: simulates jobs and starts none, so nothing would be {done} "
            f"(cluster.name={config.cluster.name}, cluster.nodes={config.cluster.nodes})",
            hint=hint,
        )
