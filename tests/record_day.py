"""``python -m tests.record_day > docs/a-day-with-a-run.txt``: records a day with a tiny run, from real commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.conftest import Cli

#: What is typed; a sentence begins with #. RUN is the first run's id.
DAY = """
# Morning: start a run, name it, and leave it alone.
hlatctl train --detach --run-id monday --name baseline --tag model=tiny --note "first corpus"
# Where is it?
hlatctl status baseline
hlatctl watch
# The loss is noisy. What would a lower rate do?
hlatctl plan --of baseline optimizer.lr=6e-3
# Do it, with a checkpoint, without losing a step.
hlatctl amend baseline optimizer.lr=6e-3 --why "noisy" --at now
hlatctl logs baseline --stage driver
# Lunch: stop it. After lunch: go on, with more steps.
hlatctl stop baseline
hlatctl resume baseline train.max_steps=1600
hlatctl diff baseline
# Does its checkpoint continue as it did? Can it anneal from step 1,000?
hlatctl verify-resume baseline --steps 5
hlatctl fork baseline --at 1000 --run-id annealed optimizer.schedule=linear train.max_steps=1100
# What does it say?
hlatctl generate baseline --prompt "the model reads" --max-new-tokens 12 --temperature 0
# Evening: what is there, and what can go?
hlatctl note baseline "good enough for the talk"
hlatctl runs
hlatctl archive annealed --yes
"""
_SHORT = 24


def record(folder: Path) -> None:
    """Run the commands in a folder and print them with what they print."""
    cli = Cli(folder)
    config = [o for o in cli.overrides if not o.startswith(("train.max_steps", "cluster.processes", "checkpoint."))]
    config += ["cluster.processes_per_node=1", "train.max_steps=1400", "checkpoint.every_steps=100"]
    config += ["checkpoint.keep=20", "optimizer.warmup_steps=50"]
    # The sizes are those of every run in this folder, so that the commands are as short as real ones.
    (folder / "conf").mkdir()
    (folder / "conf" / "hlatctl.yaml").write_text(f"overrides: {json.dumps(config)}\n", encoding="utf-8")
    hlatctl = Path(sys.executable).with_name("hlatctl")
    for line in DAY.strip().splitlines():
        if line.startswith("#"):
            print(f"\n{line}")
            continue
        print(f"$ {line}")
        _wait_for_steps(cli, line)
        done = subprocess.run(
            ["bash", "-c", line.replace("hlatctl", os.fspath(hlatctl), 1)],
            env=cli.env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        _print(done.stdout, folder)
        if done.returncode:
            sys.exit(f"{line}: exit code {done.returncode}")


def _wait_for_steps(cli: Cli, words: str) -> None:
    """Let the run train between the commands, as it would on a longer day."""
    wanted = {"status": 30, "amend": 150, "logs": 250, "stop": 500}.get(words.split()[1])
    while wanted and len(cli.events("monday", "step")) < wanted:
        time.sleep(0.2)
    while words.split()[1] == "logs" and len(cli.events("monday", "attempt_started")) < 2:
        time.sleep(0.2)


def _print(text: str, folder: Path) -> None:
    text = text.replace(os.fspath(folder), "~/lab")
    lines = [re.sub(r"process \d+", "process 4242", line) for line in text.splitlines()]
    if len(lines) > _SHORT:
        lines = [*lines[: _SHORT - 6], "...", *lines[-5:]]
    print("\n".join(line[:150] for line in lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        record(Path(name))
