"""`hlatctl doctor --cluster` on a real Slurm: one line for each thing that a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from flows.cluster_checks import _passes, check_cluster
from hlatctl.cli.main import main
from tests.slurm.lab import Lab

pytestmark = pytest.mark.processes


def shown(*overrides: str) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.shows) for check in check_cluster(compose(["cluster=slurm", *overrides]))}


def test_a_cluster_is_described_in_one_line_for_each_need(lab: Lab) -> None:
    checks = shown()
    assert checks["Slurm's commands"][0] == "pass"
    assert checks["scheduler"][1].endswith(", cluster lab")
    assert checks["partition"] == (
        "pass",
        "partition main gives at most 4 of its 4 nodes to a job, jobs of at most 1 h 0 min",
    )
    assert checks["job"] == ("pass", "cluster.nodes=2 can start in this partition")
    assert checks["accounting"][1].startswith("none: the scheduler forgets a job 300 sec after its end")
    assert checks["limits"][1] == "open files: jobs get the limit of the nodes' slurmd; preflight checks it there"
    assert shown("backend.device=cuda")["locked memory"][0] == "skip", "this shell's limit is not that of jobs"


def test_what_the_cluster_can_not_give_fails_with_a_hint(lab: Lab) -> None:
    checks = shown("cluster.slurm.partition=mian")
    assert checks["partition"][0] == checks["job"][0] == "fail"
    assert "can be main, short" in checks["partition"][1]
    lab.command("scontrol", "update", "PartitionName=urgent", "State=DRAIN")
    assert shown("cluster.slurm.partition=urgent")["partition"] == ("fail", "partition urgent is DRAIN")
    lab.command("scontrol", "update", "PartitionName=urgent", "State=UP")


def test_without_slurm_here_the_commands_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--cluster"]) == 15
    out = capsys.readouterr().out
    assert "fail  Slurm's commands: sbatch, squeue, scancel, sinfo, scontrol: not found; run hlatctl on a login" in out
    assert "scheduler" not in out
    assert "shared runs folder" in out


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"PropagateResourceLimits": "ALL", "PropagateResourceLimitsExcept": "(null)"}, {"NOFILE", "MEMLOCK"}),
        ({"PropagateResourceLimits": "NONE", "PropagateResourceLimitsExcept": "(null)"}, set()),
        ({"PropagateResourceLimits": "NOFILE", "PropagateResourceLimitsExcept": "(null)"}, {"NOFILE"}),
        ({"PropagateResourceLimits": "(null)", "PropagateResourceLimitsExcept": "MEMLOCK,CORE"}, {"NOFILE"}),
        ({}, {"NOFILE", "MEMLOCK"}),
    ],
)
def test_the_limits_that_jobs_get_of_a_shell_are_those_of_slurms_settings(
    settings: dict[str, str], passes: set[str]
) -> None:
    assert {limit for limit in ("NOFILE", "MEMLOCK") if _passes(settings, limit)} == passes
