"""Validate: the configuration's rules, and whether the corpus and tokenizer that it names are there and readable."""

from __future__ import annotations

import os
from typing import Any

import conf.validate
from conf import environment, fingerprint
from conf.initial_weights import check_initial_weights
from conf.schema import Config
from flows.runtime.ask import ask_about
from flows.runtime.context import FlowContext, is_mock
from flows.stages import run_stage
from hlatctl.plan.memory import check_memory
from hlatctl.run.errors import ConfigError, DependencyError
from hlatctl.run.manifest import checkpoint_steps
from hlatctl.run.provenance import package_versions

_TIMEOUT_S = 120


def validate(ctx: FlowContext) -> None:
    """Check the configuration and its inputs; tell what of this process's environment it overrides."""

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
        return {}

    run_stage(ctx, "validate", fingerprint.config_fingerprint(ctx.config), work)


def check(config: Config, *, begun: bool = False) -> None:
    """Check a configuration and the files that it names; of a rehearsal the configuration alone. Makes nothing.

    Args:
        config: of a run.
        begun: the run has a checkpoint of its own, so that its initial weights are needed no more.

    Raises:
        ConfigError: a rule is broken, the devices' memory is too small, the suite has no task of that name, or the
            initial weights are another model's.
        DataError: the corpus or the tokenizer is missing, empty or unreadable; a dataset of the suite is missing.
        DependencyError: a package of the suite or of its runner is missing, or the Neuron stack is another one.
        CheckpointError: the initial weights are incomplete.
    """
    conf.validate.validate(config)
    check_memory(config)
    problem = environment.software_problem(config, package_versions(environment.NEURON_PACKAGES))
    if problem:
        raise DependencyError(problem, hint="an environment of its own for each stack: docs/neuron.md, version matrix")
    if is_mock(config):
        return  # corpus, weights and the suite's packages are the cluster's, and CI has none of them
    if not begun:
        check_initial_weights(config, checksums=False)
    if config.data.inputs or config.tokenizer.path:
        ask_about("trainer.data.check", config, timeout_s=_TIMEOUT_S)
    if config.eval.enabled and (config.eval.tasks or config.eval.groups or config.eval.runner != "hf"):
        ask_about("eval.check", config, timeout_s=_TIMEOUT_S)


def refuse_simulation(config: Config, *, hint: str, done: str = "trained") -> None:
    """Refuse what could only be simulated, where nobody has asked for a simulation.

    Args:
        config: as composed.
        hint: what a person can do instead.
        done: what would not be done to the model.

    Raises:
        ConfigError: its jobs would be simulated.
    """
    if is_mock(config):
        raise ConfigError(
            f"cluster.launcher=mock: simulates jobs and starts none, so nothing would be {done} "
            f"(cluster.name={config.cluster.name}, cluster.nodes={config.cluster.nodes})",
            hint=hint,
        )
