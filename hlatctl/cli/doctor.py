"""`hlatctl doctor`: whether this machine, and with --neuron this Trainium node, is fit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import Json, Overrides, print_json
from hlatctl.run.checks import Check
from hlatctl.run.errors import PreflightError
from hlatctl.run.scratch import private_folder

if TYPE_CHECKING:
    from conf.schema import Config

_NODE_TIMEOUT_S = 1800
_ALONE = "cluster.nodes=1 eval.enabled=false tracking=none"
#: The commands that prove a node, in order: name, command (a model of seconds), what its success shows.
_RUNS = (
    (
        "compile ahead, every graph found, 20 steps",
        f"train {_ALONE} backend.coverage_gate=true train.max_steps=20",
        "all graphs were compiled ahead, a short attempt found them in the cache, and 20 steps were trained",
    ),
    (
        "killed and resumed",
        f"drill --fault kill_process {_ALONE}",
        "after a process was killed, the run resumed with exactly the losses of an undisturbed run",
    ),
)


def doctor(
    overrides: Overrides = None,
    neuron: Annotated[bool, typer.Option("--neuron", help="Also check a Trainium node; takes up to an hour.")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, and show how to install what is missing.

    Changes nothing. --neuron checks devices, software, error counters, network and kernel settings with the Neuron
    tools. Then it compiles, trains, kills and resumes a small model in a temporary folder, with backend=nxd unless
    OVERRIDES name another. The exit code is 15 if a check fails.
    """
    from conf.compose import compose

    chosen = list(overrides or [])
    if neuron and not any(override.startswith(("backend=", "backend.name=")) for override in chosen):
        chosen.insert(0, "backend=nxd")
    config = compose(chosen)
    found = []
    for check in _look(config, chosen, neuron):
        found.append(check)
        if not as_json:
            typer.echo(f"{check.status}  {check.name}: {check.shows}")
    if as_json:
        print_json([dataclasses.asdict(check) for check in found])
    failed = [check for check in found if check.status == "fail"]
    if failed:
        raise PreflightError(
            f"{len(failed)} of {len(found)} checks failed; the first: {failed[0].name}: {failed[0].shows}",
            hint=f"run `{failed[0].command}` to see the problem" if failed[0].command else "",
        )


def _look(config: Config, overrides: list[str], neuron: bool) -> Iterator[Check]:
    from hlatctl import machine_checks

    yield from machine_checks.look(config)
    if not neuron:
        return
    from flows.runtime.ask import ask_about

    lines = ask_about("trainer.neuron.node", config, timeout_s=_NODE_TIMEOUT_S).splitlines()
    node = [Check(**json.loads(line)) for line in lines]
    yield from node
    unfit = next((check for check in node if check.status == "fail"), None)
    if unfit is None:
        yield Check(**json.loads(ask_about("trainer.neuron.rounding_probe", config, timeout_s=_NODE_TIMEOUT_S)))
    with private_folder("doctor") as own:
        for name, command, shows in _RUNS:
            words = [*command.split(), *overrides]
            if unfit:
                why = f"skipped until this check passes: {unfit.name}"
                yield Check(name=name, status="skip", shows=why, command=f"hlatctl {' '.join(words)}")
            else:
                yield _run(name, [*words, f"runs_dir={own.path}", f"cluster.worker_cache_dir={own.path}/worker"], shows)


def _run(name: str, words: list[str], shows: str) -> Check:
    """A command of hlatctl as a process of its own; its last words tell what went wrong."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "hlatctl", *words], capture_output=True, text=True, errors="replace", check=False
    )
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    problem = (said or [f"ended with exit code {result.returncode}"])[-1] if result.returncode else ""
    values = {"wall_s": round(time.monotonic() - started, 1)}
    return Check.judged(name, problem, shows, command=f"hlatctl {' '.join(words)}", values=values)
