"""What a partition can never give is refused before anything is created, with the partition's own limits."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import (
    ClusterConfig,
    Config,
    ContainerConfig,
    EvalClusterConfig,
    EvalConfig,
    SlurmConfig,
    SlurmDriverConfig,
)
from flows import pretrain
from flows.launch.base import AwayError
from flows.launch.slurm.commands import Queue, own_jobs
from flows.launch.slurm.kept_nodes import KeptNodes
from flows.launch.slurm.limits import (
    check,
    check_driver,
    check_evaluations,
    least_time_s,
    maintenance_text,
    partitions,
    seconds,
    stops,
)
from hlatctl.run.errors import ConfigError
from hlatctl.run.processes import user_name
from tests.slurm.lab import Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def cluster(nodes: int = 2, **settings: object) -> ClusterConfig:
    return ClusterConfig(launcher="slurm", nodes=nodes, slurm=SlurmConfig(**settings))  # type: ignore[arg-type]


@pytest.fixture
def small(lab: Lab) -> Iterator[None]:
    limits = "MaxNodes=3 MinNodes=2 AllowAccounts=physics,maths DefaultTime=30:00"
    lab.command("scontrol", "update", "NodeName=n1", "AvailableFeatures=gpu,hbm80g", "ActiveFeatures=gpu,hbm80g")
    for name, who in (("open", f"users={user_name()}"), ("shut", "users=daemon")):
        lab.command(
            "scontrol",
            "create",
            "reservation",
            f"ReservationName={name}",
            "StartTime=now+60minutes",
            "Duration=120",
            "NodeCnt=2",
            "PartitionName=main",
            "Flags=OVERLAP",
            who,
        )
    lab.command("scontrol", "create", "PartitionName=small", "Nodes=n[1-4]", "MaxTime=1-02:00:00", *limits.split())
    yield
    for name in ("open", "shut"):
        lab.command("scontrol", "delete", f"ReservationName={name}")
    lab.command("scontrol", "update", "NodeName=n1", "AvailableFeatures=", "ActiveFeatures=")
    lab.command("scontrol", "delete", "PartitionName=small")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            cluster(5),
            "cluster.nodes=5: partition main gives at most 4 of its 4 nodes to a job, jobs of at most 1 h 0 min",
        ),
        (
            dataclasses.replace(cluster(3), spare_nodes=2),
            "cluster.spare_nodes=2: with cluster.nodes=3, partition main gives at most 4 of its 4 nodes to a job, jobs "
            "of at most 1 h 0 min\nhint: use at most 1",
        ),
        (cluster(time_limit_s=7200), "cluster.slurm.time_limit_s=7200: partition main gives at most 4 of its 4 nodes"),
        (cluster(partition="mian"), "cluster.slurm.partition=mian: the cluster has no partition mian\nhint: "),
        (
            cluster(4, partition="small"),
            "cluster.nodes=4: partition small gives at most 3 of its 4 nodes to a job, jobs of at most 1 d 2 h "
            "(30 min 0 s by default)",
        ),
        (
            cluster(partition="short,main"),
            "cluster.slurm.time_limit_s=null: partition short gives 1 min 0 s to a job that names no limit, and "
            "training is asked to stop cluster.slurm.stop_before_limit_s=300 before it",
        ),
        (
            cluster(partition="small", account="maths", stop_before_limit_s=1800),
            "cluster.slurm.time_limit_s=null: partition small gives 30 min 0 s to a job that names no limit",
        ),
        (cluster(1, partition="small"), "cluster.nodes=1: partition small starts no job of fewer than 2 nodes"),
        (
            cluster(partition="small", account="arts"),
            "cluster.slurm.account=arts: may not use partition small\nhint: cluster.slurm.account can be physics",
        ),
        (cluster(extra=["--gres=gpu:8"]), "cluster.slurm.extra=[--gres=gpu:8]: sbatch refuses a job with"),
        (cluster(extra=["--nonsense"]), "cluster.slurm.extra=[--nonsense]: sbatch refuses a job with"),
        (
            cluster(constraint="gpu&fast"),
            "cluster.slurm.constraint=gpu&fast: no node of partition main has feature fast\n",
        ),
        (
            cluster(gpus_per_node=8),
            "cluster.slurm.gpus_per_node=8: nodes of partition main have no GPUs that Slurm counts\nhint: use cluster."
            "slurm.gpus_per_node=null",
        ),
        (
            cluster(reservation="course"),
            "cluster.slurm.reservation=course: the cluster has no such reservation\nhint: reservations that you may "
            "use: open",
        ),
        (cluster(reservation="shut"), f"cluster.slurm.reservation=shut: may not be used by {user_name()}\nhint: "),
        (cluster(3, reservation="open"), "cluster.nodes=3: reservation open has 2 nodes\nhint: use at most 2"),
        (
            cluster(setup_script="/nowhere/env.sh"),
            "cluster.slurm.setup_script=/nowhere/env.sh: there is no such file here",
        ),
        (
            dataclasses.replace(cluster(), container=ContainerConfig(image="/nowhere/h.sif")),
            "cluster.container.image=/nowhere/h.sif: there is no such file here",
        ),
        (cluster(5, partition="short,main"), "cluster.nodes=5: partition main gives at most 4"),
    ],
)
def test_what_no_partition_gives_is_refused(small: None, cluster: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(cluster)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (
            {"partition": "nowhere"},
            "eval.cluster.partition=nowhere: the cluster has no partition nowhere\nhint: eval.cluster.partition can",
        ),
        ({"partition": "small"}, "eval.cluster.partition=small: starts no job of one node, which evaluations are"),
        ({"extra": ["--gres=gpu:9"]}, "eval.cluster.extra=[--gres=gpu:9]: sbatch refuses a job with these options"),
    ],
)
def test_evaluations_that_no_partition_gives_are_refused(small: None, evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_evaluations(Config(cluster=cluster(), eval=EvalConfig(cluster=EvalClusterConfig(**evaluation))))
    assert str(caught.value).startswith(message)


def test_a_driver_that_no_partition_starts_is_refused(lab: Lab, small: None) -> None:
    check_driver(cluster(), ["--cpus-per-task=1"], least_s=360)
    for own, message in (
        (
            {"partition": "apart"},
            "cluster.slurm.driver.time_limit_s=86400: partition apart gives 1 min 0 s to a driver",
        ),
        ({"partition": "small"}, "cluster.slurm.driver.partition=small: partition small starts no job of one node"),
        ({"partition": "nowhere"}, "cluster.slurm.driver.partition=nowhere: the cluster has no partition nowhere"),
    ):
        config = cluster(driver=SlurmDriverConfig(**own))  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            check_driver(config, [], least_s=360)
        assert str(caught.value).startswith(message)
    lab.command("scontrol", "update", "PartitionName=main", "AllocNodes=login1")
    try:
        with pytest.raises(
            ConfigError, match=r"can't submit jobs to partition main, which takes them from login1 only"
        ):
            check_driver(cluster(), [], least_s=360)
    finally:
        lab.command("scontrol", "update", "PartitionName=main", "AllocNodes=ALL")


def test_a_shape_that_one_of_the_partitions_can_give_is_accepted(lab: Lab, small: None) -> None:
    check(cluster(4))
    check(cluster(partition="short,main", time_limit_s=3600))
    check(cluster(2, partition="small", account="maths", time_limit_s=26 * 3600))
    check(cluster(1, constraint="gpu&hbm80g"))
    check(cluster(2, reservation="open"))
    lab.command("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    check(cluster(4))  # its nodes may come back
    lab.command("scontrol", "update", "NodeName=n1", "State=RESUME")


@pytest.fixture
def maintenance(lab: Lab) -> Iterator[str]:
    """A job that runs when an administrator reserves all nodes in half an hour, ignoring it."""
    lab.wait_until_idle()
    job = lab.command("sbatch", "--parsable", "--time=50", "--output=/dev/null", "--wrap=sleep 600").stdout.strip()
    wait_for(lambda: own_jobs(f"--jobs={job}")[0].state == "RUNNING")
    when = ("StartTime=now+30minutes", "Duration=60", "Flags=MAINT,IGNORE_JOBS", "Nodes=n[1-4]", "Users=root")
    made = lab.command("scontrol", "create", "reservation", "ReservationName=upgrade", *when)
    assert made.returncode == 0, made.stderr
    yield job
    lab.command("scancel", "--user=root")
    wait_for(lambda: not own_jobs())
    lab.command("scontrol", "delete", "ReservationName=upgrade")


def test_jobs_end_before_a_maintenance_reservation(lab: Lab, maintenance: str) -> None:
    now, hour = time.time(), cluster(time_limit_s=3600)
    said = maintenance_text(hour, now)
    assert said.startswith("maintenance upgrade takes 4 of the 4 nodes of partition main from "), said
    assert ": a job of 1 h 0 min would reach into it, so training saves a checkpoint and ends before it" in said
    assert maintenance_text(cluster(time_limit_s=900), now) == ""
    assert least_time_s(cluster(time_limit_s=900), now) is None
    known = stops(hour, now)
    assert known.after_s == 3300
    assert known.maintenance_unix_s
    assert 1700 < known.maintenance_unix_s[0] - now <= 1800
    least_s = least_time_s(hour, now)
    assert least_s
    assert 800 < least_s <= 900

    options = ("--parsable", "--time=60", "--output=/dev/null", "--wrap=sleep 600")
    whole = lab.command("sbatch", *options).stdout.strip()
    short = lab.command("sbatch", f"--time-min={least_s // 60}", *options).stdout.strip()
    wait_for(lambda: own_jobs(f"--jobs={short}")[0].state == "RUNNING")
    assert (seconds(own_jobs(f"--jobs={short}")[0].left) or 0) <= 1800
    assert own_jobs(f"--jobs={whole}")[0].state == "PENDING"
    wait_for(lambda: "maintenance" in own_jobs(f"--jobs={whole}")[0].reason)
    KeptNodes(hour, Queue()).end_before_maintenance(own_jobs(f"--jobs={whole}")[0])
    wait_for(lambda: own_jobs(f"--jobs={whole}")[0].state == "RUNNING")

    (running,) = own_jobs(f"--jobs={maintenance}")
    assert (seconds(running.left) or 0) > 1800
    KeptNodes(hour, Queue()).end_before_maintenance(running)
    assert 1600 < (seconds(own_jobs(f"--jobs={maintenance}")[0].left) or 0) <= 1800


def test_nothing_is_created_for_a_run_that_can_not_start(lab: Lab, tmp_path: Path) -> None:
    where = ["cluster=slurm", f"runs_dir={tmp_path / 'runs'}"]
    with pytest.raises(ConfigError, match=r"cluster\.nodes=8: partition main gives at most 4"):
        pretrain.create(compose([*where, "cluster.nodes=8", "eval.enabled=false"]), argv=[])
    with pytest.raises(ConfigError, match=r"eval\.cluster\.partition=nowhere: the cluster has no partition"):
        pretrain.create(compose([*where, "eval.cluster.partition=nowhere"]), argv=[])
    assert not (tmp_path / "runs").exists()


def test_a_scheduler_that_does_not_answer_is_no_limit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {partition.name for partition in partitions()} >= {"main", "short"}
    monkeypatch.setenv("SLURM_CONF", str(lab.hasty))
    lab.stop_controller()
    try:
        with pytest.raises(AwayError):
            check(cluster())
    finally:
        lab.start_controller()


#: Answers of a cluster with accounting, which the lab has none of; everything else is asked of the real commands.
SCONTROL = """#!/bin/sh
[ "$2" = config ] && { echo "AccountingStorageEnforce = associations,limits,qos"; exit; }
exec /usr/bin/scontrol "$@"
"""
SACCTMGR = """#!/bin/sh
case "$*" in
*" assoc "*) printf 'physics||normal,debug\\nmaths|elsewhere|normal\\nmusic||huge\\n' ;;
*" qos debug "*) echo '00:30:00|node=1|' ;;
*" qos huge "*) echo '||cpu=1,node=3' ;;
esac
"""


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            cluster(account="arts"),
            f"cluster.slurm.account=arts: {user_name()} may not charge jobs to it\nhint: cluster.",
        ),
        (cluster(account="maths"), f"cluster.slurm.account=maths: {user_name()} may not charge jobs"),
        (
            cluster(account="physics", qos="huge"),
            f"cluster.slurm.qos=huge: {user_name()} may not use it with cluster.slurm.account=physics\n"
            "hint: cluster.slurm.qos can be debug, normal",
        ),
        (cluster(qos="debug"), "cluster.nodes=2: QOS debug gives a job at most 1 nodes"),
        (
            cluster(1, qos="debug", time_limit_s=2400),
            "cluster.slurm.time_limit_s=2400: QOS debug lets a job run for at most 30 min 0 s\nhint: use at most 1800",
        ),
        (cluster(qos="huge"), "cluster.nodes=2: QOS huge starts no job of fewer than 3 nodes"),
        (cluster(account="physics", qos="normal"), ""),
    ],
)
def test_accounting_says_what_a_user_may_use(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, message: str
) -> None:
    for name, text in (("scontrol", SCONTROL), ("sacctmgr", SACCTMGR)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError) if message else nullcontext() as caught:
        check(cluster)
    assert not caught or str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-02:00:00", 93600), ("01:00:00", 3600), ("30:00", 1800), ("UNLIMITED", None), ("NONE", None)],
)
def test_times_of_slurm_are_read(text: str, expected: int | None) -> None:
    assert seconds(text) == expected
