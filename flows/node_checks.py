"""Checks of a Trainium node, for ``hlatctl doctor --neuron``: its tools and devices, then short runs on it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

from conf.schema import Config
from flows.runtime import spawn
from flows.runtime.ask import ask_about
from hlatctl.run import child
from hlatctl.run.checks import Check
from hlatctl.run.scratch import private_folder

_TIMEOUT_S = 1800
_ALONE = "cluster.nodes=1 eval.enabled=false tracking=none"
#: The runs of a small model, in order: name, command, what its success shows.
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


def check_node(config: Config, overrides: list[str]) -> Iterator[Check]:
    """Yield each check as it is done. After a failed check of the node, the remaining ones are skipped.

    Args:
        config: the configuration to check for.
        overrides: those that made it.
    """
    checks = [Check(**json.loads(line)) for line in _ask("trainer.neuron.node", config).splitlines()]
    yield from checks
    failed = next((check for check in checks if check.status == "fail"), None)
    if failed is None:
        yield Check(**json.loads(_ask("trainer.neuron.rounding_probe", config)))
    with private_folder("doctor") as own:
        for name, command, shows in _RUNS:
            words = [*command.split(), *overrides]
            if failed:
                why = f"skipped until this check passes: {failed.name}"
                yield Check(name=name, status="skip", shows=why, command=f"hlatctl {' '.join(words)}")
            else:
                yield run_command(
                    name, [*words, f"runs_dir={own.path}", f"cluster.worker_cache_dir={own.path}/worker"], shows
                )


def _ask(module: str, config: Config) -> str:
    return ask_about(module, config, timeout_s=_TIMEOUT_S)


def run_command(name: str, words: list[str], shows: str) -> Check:
    """Run a command of hlatctl in a process of its own. If it fails, the check shows the last error that it prints."""
    started = time.monotonic()
    result = subprocess.run(
        spawn.command("hlatctl", *words),
        env=child.environment(),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    problem = (errors or [f"ended with exit code {result.returncode}"])[-1] if result.returncode else ""
    values = {"wall_s": round(time.monotonic() - started, 1)}
    return Check.of(name, problem, shows, command=f"hlatctl {' '.join(words)}", values=values)
