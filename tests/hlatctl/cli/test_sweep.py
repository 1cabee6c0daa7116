"""`hlatctl sweep` and what `status`, `resume` and `stop` make of a sweep; asking before money is spent."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from hlatctl.run.paths import SweepPaths
from tests.hlatctl.cli.conftest import FakeSlurm

HARDWARE = [
    f"cluster.hardware.{name}=1e10"
    for name in (
        "bf16_flops_per_s",
        "fp32_flops_per_s",
        "memory_bytes_per_s",
        "link_bytes_per_s",
        "network_bytes_per_s",
    )
] + ["cluster.hardware.compute_efficiency=1", "cluster.hardware.collective_efficiency=1"]
SMALL = ["eval.enabled=false", "train.max_steps=4", "train.tokens=1M", "tracking=none", "recovery.backoff_s=0"]


@pytest.fixture
def swept(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", str(tmp_path))
    assert main(["sweep", "--dry-run", "--sweep-id", "rates", *SMALL, "optimizer.lr=1e-3,3e-3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "rates\n", "stdout is data: the sweep's id"
    assert "2 trials (2 arms), 1 at once: 8 steps" in captured.err
    assert captured.err.startswith("SIMULATED: nothing is trained, and every number is made up\n")
    return tmp_path


@pytest.mark.processes
def test_the_commands_know_a_sweep_by_its_name(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "rates"]) == 0
    assert "optimizer.lr=0.003" in capsys.readouterr().out
    assert main(["status", "rates", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["status"], len(state["trials"]), state["direction"]) == ("finished", 2, "min")
    assert main(["status", "rates-t0001"]) == 0
    assert "SIMULATED" in capsys.readouterr().out, "a trial is a run"
    assert main(["resume", "rat"]) == 0
    assert "sweep rates is finished" in capsys.readouterr().err
    assert main(["sweep", "--extend", "rates", "optimizer.lr=1e-3,3e-3,1e-2"]) == 0
    assert "rates-t0002: finished" in capsys.readouterr().err
    assert main(["sweep", "--extend", "rates", "seed=1,2"]) == 10
    assert "seed=1,2: changes the sweep's search space: its axes are optimizer.lr" in capsys.readouterr().err
    assert main(["sweep", "--extend", "rates-t0000", "seed=1,2"]) == 10
    assert "--extend=rates-t0000: rates-t0000 is a run, not a sweep" in capsys.readouterr().err
    assert main(["sweep-report", "rates"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{swept / 'rates' / 'report' / 'index.html'}\n"
    assert captured.err == "in the same folder: summary.md, numbers.json, figures, best.yaml\n"
    assert main(["sweep-report", "rates-t0000"]) == 10
    assert "SWEEP=rates-t0000: rates-t0000 is a run, not a sweep" in capsys.readouterr().err
    assert main(["stop", "rates"]) == 0
    assert "rates: is already finished" in capsys.readouterr().err


@pytest.mark.processes
def test_a_sweep_is_driven_by_a_job_that_status_stop_and_resume_know(
    runs_dir: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--sweep-id", "s", *SMALL, "seed=1,2", "--driver", "slurm"]
    assert main(words) == 10
    assert "with cluster.launcher=local, the run's jobs would start inside" in capsys.readouterr().err
    assert main([*words, "cluster=slurm", "--dry-run"]) == 10
    assert "--driver=slurm: a simulation starts no jobs\nhint: omit --driver" in capsys.readouterr().err
    assert main([*words, "cluster=slurm", "--yes"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "s\n"
    assert "the sweep's driver is Slurm job 7; this command may end now" in captured.err
    sweep = SweepPaths(runs_dir / "s")
    assert os.fspath(sweep.root) in sweep.driver_job.with_suffix(".sh").read_text()
    assert main(["status", "s"]) == 0
    captured = capsys.readouterr()
    assert "Slurm job 7 waits in the queue (Dependency)" in captured.out
    assert "hlatctl resume" not in captured.err
    slurm.forget()
    assert main(["status", "s"]) == 0
    assert "`hlatctl resume s --driver slurm` submits one" in capsys.readouterr().out
    assert main(["resume", "s", "--driver", "slurm"]) == 0
    assert "the sweep's driver is Slurm job 7" in capsys.readouterr().err
    assert main(["stop", "s", "--wait", "1"]) == 0
    assert not sweep.driver_job.exists()


def test_unknown_or_great_cost_needs_a_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    priced = ["sweep", *SMALL, "seed=1,2", "cluster.price_usd_per_node_hour=20"]
    assert main(priced) == 10
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "error: cluster.confirm_above_usd=100: the sweep has an unknown cost; that must be confirmed, and input is not "
        "a terminal",
        "hint: pass --yes to confirm, or raise the limit in the cluster's configuration",
    ]
    assert main([*priced, *HARDWARE, "cluster.price_usd_per_node_hour=1e9"]) == 10
    message = capsys.readouterr().err
    assert re.search(r"2 trials .*; at most .* of training, .* process-hours, predicted, [\d,.]+ USD\n", message)
    assert re.search(r"error: cluster.confirm_above_usd=100: the sweep costs [\d,.]+ USD; that must be", message)
    assert not (tmp_path / "runs").exists(), "nothing has been made"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=1"], "nothing is swept"),
        (
            ["cluster=local,simulated"],
            "cluster.launcher=simulated: simulates jobs and starts none, so nothing would be trained",
        ),
        (["seed=1,2", "sweep.objective=validation_loss"], "no trial reports it, because eval.enabled=false"),
        (["optimizer.lr=1e-3,-1"], "optimizer.lr=-1.0: must be greater than 0 (in the arm optimizer.lr=-1)"),
        (["seed=1,2", "sweep.parallel=5000"], "sweep.parallel=5000: with 1 processes or threads each"),
    ],
)
def test_bad_input_makes_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *SMALL, *arguments]) == 10
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
