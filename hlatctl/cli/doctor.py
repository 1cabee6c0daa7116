"""`hlatctl doctor`: checks this machine, with --neuron this Trainium node, with --cluster the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import ConfigDirs, Json, Overrides, RunsDir, print_json, with_runs_dir, write
from hlatctl.run.checks import Check
from hlatctl.run.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from conf.schema import Config


def doctor(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    neuron: Annotated[bool, typer.Option("--neuron", help="Also check a Trainium node; takes up to an hour.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also check the Slurm or Kubernetes cluster: commands, rights, limits.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Check this machine, and say how to install what lacks.

    Changes nothing. --neuron checks devices, software, error counters, network and kernel settings with the Neuron
    tools. Then it compiles, trains, kills and resumes a small model in a temporary folder, with backend=nxd unless
    OVERRIDES name another. --cluster asks Slurm's commands or kubectl and submits nothing, with cluster=slurm unless
    OVERRIDES name another. The exit code is 15 if a check fails.
    """
    from conf.compose import compose

    chosen = with_runs_dir(overrides, runs_dir)
    if neuron and not any(override.startswith(("backend=", "backend.name=")) for override in chosen):
        chosen.insert(0, "backend=nxd")
    if cluster and not any(override.startswith("cluster=") for override in chosen):
        chosen.insert(0, "cluster=slurm")
    config = compose(chosen)
    checks = []
    for check in _checks(config, chosen, neuron=neuron, cluster=cluster):
        checks.append(check)
        if not as_json:
            write(f"{check.status}  {check.name}: {check.shows}")
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        raise PreflightError(
            f"{len(failed)} of {len(checks)} checks failed; the first: {failed[0].name}: {failed[0].shows}",
            hint=f"run `{failed[0].command}` to see the problem" if failed[0].command else "",
        )


def _checks(config: Config, overrides: list[str], *, neuron: bool, cluster: bool) -> Iterator[Check]:
    from hlatctl import machine_checks

    yield from machine_checks.look(config)
    if neuron:
        from flows.cluster_checks import check_node

        yield from check_node(config, overrides)
    if cluster:
        from conf.registries import LAUNCHERS

        check = LAUNCHERS.part(config.cluster.launcher, "check")
        if check is None:
            raise ConfigError(
                f"cluster.launcher={config.cluster.launcher}: has no checks of a cluster",
                hint="use cluster=slurm or cluster=kubernetes, or leave --cluster out",
            )
        yield from check(config)
