"""Two simultaneous real trials, while the sweep's driver is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

import conf.load
from conf.compose import local_cores
from hlatctl.run.journal import read_events
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import fold
from tests.e2e.conftest import Cli
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def prefect_flow_runs(cli: Cli) -> dict[str, Any]:
    """Return the flow runs that Prefect's client reads, in a process that has its settings."""
    code = (
        "import json; from prefect.client.orchestration import get_client\n"
        "with get_client(sync_client=True) as client:\n"
        "    print(json.dumps({r.name: r.model_dump(mode='json') for r in client.read_flow_runs()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=cli.env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_a_sweep_whose_driver_is_killed_continues_with_the_running_trials(tracked: Cli) -> None:
    cli = tracked
    sweep, ids = SweepPaths(cli.runs_dir / "swept"), ["swept-t0000", "swept-t0001"]
    parallel = min(2, local_cores())
    driver = cli.start(
        "sweep",
        "--sweep-id",
        "swept",
        *cli.overrides,
        "cluster.processes_per_node=1",
        "train.max_steps=150",
        "optimizer.lr=1e-4,1e-2",
        f"sweep.parallel={parallel}",
    )
    wait_for(lambda: all(cli.events(run_id, "step") for run_id in ids[:parallel]))
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    result = cli.run("resume", "swept")
    assert result.returncode == 0, result.stderr
    state = fold(read_events(sweep))
    assert [(trial.run_id, trial.status) for trial in state.trials.values()] == [(name, "finished") for name in ids]
    for run_id, lr in zip(ids, (1e-4, 1e-2), strict=True):
        assert len(cli.events(run_id, "attempt_started")) == 1, "no trial was trained twice"
        assert len(cli.losses(run_id)) == 150
        assert conf.load.load(cli.paths(run_id).config).optimizer.lr == lr
    status = json.loads(cli.run("status", "swept", "--json").stdout)
    losses = [status["trials"][number]["value"] for number in ("0", "1")]
    assert losses[1] < losses[0], "the larger rate learns more from little text"
    assert result.stderr.splitlines()[-1].endswith(f"optimizer.lr=0.01: {losses[1]:.4f}")
    assert sweep.study.is_file()
    assert f"report: {sweep.report / 'index.html'}" in result.stderr
    assert "  lr: 0.01\n" in sweep.best.read_text(encoding="utf-8")
    flow_runs = prefect_flow_runs(cli)
    assert "swept" in flow_runs
    assert all(flow_runs[name]["parent_task_run_id"] for name in ids), "trials are children of the sweep's flow run"
