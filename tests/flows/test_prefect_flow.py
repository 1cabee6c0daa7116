"""The pipeline under a real Prefect: tasks and states are recorded, and a Prefect that goes away costs only the view.

Prefect keeps settings and an engine for the whole process, so each test drives its run in a process of its own.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from conf.schema import Config
from flows import pretrain
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths

DRIVE = """
import sys
from pathlib import Path
from flows import prefect_env, pretrain
from hlatctl.run.paths import RunPaths

class Talk:
    def update(self, state, config): pass
    def message(self, text):
        print(text, flush=True)
        if len(sys.argv) > 2 and text.startswith(sys.argv[2]):
            prefect_env._own_server.kill()
            prefect_env._own_server.wait()

pretrain.drive(RunPaths(Path(sys.argv[1])), Talk())
"""


def drive(run: RunPaths, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    result = subprocess.run(
        [sys.executable, "-c", DRIVE, os.fspath(run.root), *arguments],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_stages_attempts_and_evaluations_are_tasks_of_one_flow_run(mock_config: Config) -> None:
    run = pretrain.create(mock_config, argv=[], run_id="seen")
    drive(run)
    with sqlite3.connect(Path(mock_config.runs_dir) / ".prefect" / "prefect.db") as database:
        (flow,) = database.execute("select name, state_name from flow_run").fetchall()
        tasks = database.execute("select name, state_name from task_run").fetchall()
        artifacts = {key for (key,) in database.execute("select key from artifact")}
    assert flow == ("seen (SIMULATED)", "Completed")
    assert {name for name, _ in tasks} == {
        "validate", "provenance", "preflight", "data", "compile", "warm cache", "coverage", "train attempt 1",
        "train attempt 2",
        "evaluate 833,333 tokens", "evaluate 1,666,666 tokens", "evaluate 2,506,752 tokens", "report",
    }  # fmt: skip
    assert {state for _, state in tasks} == {"Completed"}
    assert {"summary", "training"} <= artifacts


def test_a_prefect_that_goes_away_in_the_middle_costs_only_the_view(mock_config: Config) -> None:
    run = pretrain.create(mock_config, argv=[], run_id="alone")
    output = drive(run, "attempt 1: started")
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("eval_finished") == 3
    assert kinds.count("attempt_started") == 2
    assert kinds[-1] == "run_finished"
    assert "Prefect" in output
