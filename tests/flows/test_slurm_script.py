"""The batch scripts of Slurm jobs, as golden files. ``tests/slurm`` runs them."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.schema import ClusterConfig, ContainerConfig, SlurmConfig
from flows.launch.base import Job
from flows.launch.slurm import drivers, launcher, limits
from flows.launch.slurm.drivers import SlurmDrivers
from flows.launch.slurm.script import allocation_script, script
from hlatctl.cache.environment import Packer
from hlatctl.run.errors import ConfigError
from hlatctl.run.files import read_sealed_json

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
#: Set to write the golden files anew; look at the difference before it is committed.
UPDATE = "HLATCTL_UPDATE_GOLDEN"
EVIL = "'; touch x; $(touch x) `touch x` \" \\ %j\nnext line"

PLAIN = ClusterConfig(launcher="slurm")
EVERYTHING = ClusterConfig(
    launcher="slurm",
    nodes=2,
    processes_per_node=8,
    interface="eth0",
    slurm=SlurmConfig(
        partition="gpu",
        account="physics",
        qos="long",
        time_limit_s=90_061,
        stop_before_limit_s=600,
        reservation="course",
        constraint="$(touch x)|'a b'\\",
        gpus_per_node=8,
        modules=["CUDA/12.9", "$(touch x)"],
        setup_script="/project/a b/$(touch x).sh",
        extra=["--mem=0"],
    ),
)
TRAIN = Job(
    name="train",
    run_dir=Path("/runs/golden"),
    argv=("-m", "trainer", "--run-dir", "/runs/golden", "--attempt", "2"),
    launch_dir=Path("/runs/golden/launch/attempt-0002"),
    log_dir=Path("/runs/golden/logs/attempt-0002"),
    env={"OMP_NUM_THREADS": "1", "EVIL": EVIL},
    unset=("XLA_USE_BF16",),
    processes_per_node=8,
    nodes=2,
    excluded_hosts=("n3", "n7"),
)
FORKS = dataclasses.replace(
    TRAIN, shared_modules=("trainer.backends.torch_native", "torch._dynamo"), stays="failed", keeps_nodes=True
)
ONE = dataclasses.replace(
    TRAIN,
    name="eval-833333",
    run_dir=Path("/runs/a $(touch x)'%j"),
    argv=("-m", "eval", "--note", EVIL),
    launch_dir=Path("/runs/a $(touch x)'%j/launch/attempt-0000"),
    log_dir=Path("/runs/a $(touch x)'%j/logs/attempt-0000"),
    processes_per_node=0,
    unset=(),
    excluded_hosts=(),
)


def in_container(**settings: object) -> ClusterConfig:
    container = ContainerConfig(mounts=["/data:/data:ro"], **settings)  # type: ignore[arg-type]
    return dataclasses.replace(PLAIN, container=container)


@pytest.mark.parametrize(
    ("name", "job", "cluster"),
    [
        ("train", TRAIN, EVERYTHING),
        ("forks", FORKS, EVERYTHING),
        ("one_process", ONE, PLAIN),
        ("pyxis", TRAIN, in_container(image="nvcr.io#nvidia/pytorch:25.09-py3", options=["--no-container-mount-home"])),
        (
            "apptainer",
            TRAIN,
            in_container(image="/images/h.sif", runtime="apptainer", options=["--nv"], python="/opt/venv/bin/python"),
        ),
    ],
)
def test_the_script_equals_the_golden_file(name: str, job: Job, cluster: ClusterConfig) -> None:
    compare(name, script(job, cluster))


@pytest.mark.parametrize(
    ("training", "devices", "own", "asked"),
    [
        (8, 1, [], ["--gpus-per-node=1"]),
        (["--gpus-per-node=h100:8"], 1, [], ["--gpus-per-node=h100:1"]),
        (["--gpus-per-node=h100:8", "--mem=0"], 2, [], ["--gpus-per-node=h100:2"]),
        (["--gpus=16"], 8, [], ["--gpus=8"]),  # on all nodes
        (["--gres=gpu:h100:8,nvme:1"], 1, [], ["--gres=gpu:h100:1,nvme:1"]),
        (["--gres=gpu:4"], 1, [], ["--gres=gpu:1"]),  # of two processes each
        (["--tres-per-task=gres/gpu:8"], 4, [], ["--tres-per-task=gres/gpu:4"]),
        (["--gpus-per-node=8"], 0, [], []),  # on the CPU
        (["--gpus-per-node=8"], 1, ["--gres=gpu:a100:1"], ["--gres=gpu:a100:1"]),
        (["--gpus-per-node=8"], 1, ["--time=1:00"], ["--gpus-per-node=1", "--time=1:00"]),
        (["--mem=0"], 1, [], ["--exclusive"]),  # devices that come with the node
    ],
)
def test_a_job_without_torchrun_asks_for_its_share_of_the_devices_of_training(
    training: list[str] | int, devices: int, own: list[str], asked: list[str]
) -> None:
    own_key = isinstance(training, int)
    settings = SlurmConfig(gpus_per_node=training) if own_key else SlurmConfig(extra=training)  # type: ignore[arg-type]
    cluster = dataclasses.replace(EVERYTHING, slurm=settings)
    job = dataclasses.replace(ONE, devices=devices, options=tuple(own))
    without = script(dataclasses.replace(ONE), cluster).splitlines()
    lines = [line.removeprefix("#SBATCH ") for line in script(job, cluster).splitlines() if line not in without]
    assert lines == asked


def test_no_process_waits_for_jobs_that_a_container_or_a_first_failure_starts_anew() -> None:
    assert "--warm" in script(FORKS, PLAIN)
    assert "--warm" not in script(dataclasses.replace(FORKS, stays=""), PLAIN)
    assert "--warm" not in script(FORKS, in_container(image="/images/h.sif", runtime="apptainer"))


def test_the_script_that_keeps_nodes_equals_the_golden_file() -> None:
    cluster = dataclasses.replace(EVERYTHING, spare_nodes=1)
    compare("nodes", allocation_script(TRAIN, cluster, Path("/runs/golden/launch/allocation-0001")))


def test_nodes_start_the_python_of_a_bundle_on_shared_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLATCTL_PYTHON", "/shared/bundle/hlatctl-python")
    for text in (script(TRAIN, PLAIN), allocation_script(TRAIN, PLAIN, Path("/runs/golden/launch/allocation-0001"))):
        assert "/shared/bundle/hlatctl-python -m" in text
        assert sys.executable not in text


def test_a_drivers_job_runs_the_python_of_a_bundle_and_asks_for_nothing_of_the_nodes_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HLATCTL_PYTHON", "/shared/bundle/hlatctl-python")
    monkeypatch.setattr(limits, "partitions", lambda: [SimpleNamespace(name="gpu", max_time_s=3600)])
    text = SlurmDrivers().script(Path("/runs/golden/driver-job.json"), ("resume", "golden"), EVERYTHING)
    program = "/shared/bundle/hlatctl-python -P -m hlatctl.driver_job"
    assert f"exec {program} /runs/golden/driver-job.json resume golden" in text
    options = {line.split()[1].partition("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--partition", "--account", "--qos", "--time", "--mem"} < options
    assert not options & {"--reservation", "--constraint", "--gpus-per-node", "--exclusive"}
    assert limits.driver_cluster(EVERYTHING).slurm.gpus_per_node is None, "and sbatch isn't asked about any"


@pytest.mark.parametrize(("left_s", "changes"), [(3000, ["TimeMin=21"]), (3960, []), (60, [])])
def test_the_job_after_a_drivers_job_fits_before_a_maintenance(
    left_s: int, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its least time is an hour, and the maintenance begins in 70 min."""
    partition = SimpleNamespace(name="gpu", max_time_s=None, hosts="n1")
    told: list[str] = []
    monkeypatch.setattr(limits, "partitions", lambda: [partition])
    monkeypatch.setattr(limits, "hosts_of", lambda hosts: (hosts,))
    monkeypatch.setattr(drivers, "hosts_of", lambda hosts: (hosts,))
    soon = limits.Maintenance(name="m", start_unix_s=4200.0, end_unix_s=9000.0, hosts="n1")
    monkeypatch.setattr(limits, "maintenances", lambda now_unix_s: [soon])
    jobs = [
        SimpleNamespace(id="7", state="RUNNING", left=f"{left_s // 60}:00"),
        SimpleNamespace(id="8", state="PENDING", left="0:00"),
    ]
    monkeypatch.setattr(drivers, "own_jobs", lambda name: jobs)
    monkeypatch.setattr(drivers, "slurm", lambda *words: told.extend(words[2:]))
    drivers.fit_next(Path("/runs/golden/driver-job.json"), EVERYTHING, 0.0)
    assert told == [word for change in changes for word in ("JobId=8", change)]


def compare(name: str, text: str) -> None:
    text = text.replace(sys.executable, "PYTHON")
    path = GOLDEN / f"{name}.sh"
    if os.environ.get(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"extra": ["--comment=a\n#SBATCH --uid=0"]}, r"--comment=a\\n#SBATCH --uid=0': must not contain a line break"),
        ({"partition": "a\rb"}, "must not contain a line break"),
    ],
)
def test_a_value_can_not_add_a_line_of_options(settings: dict[str, object], shown: str) -> None:
    cluster = ClusterConfig(launcher="slurm", slurm=SlurmConfig(**settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=shown):
        script(TRAIN, cluster)


def test_a_runs_folder_that_slurm_or_a_mount_can_not_name_is_refused() -> None:
    job = dataclasses.replace(TRAIN, log_dir=Path("/runs\\x/logs"))
    with pytest.raises(ConfigError, match="must not contain a backslash"):
        script(job, PLAIN)
    job = dataclasses.replace(TRAIN, run_dir=Path("/runs:1/golden"))
    with pytest.raises(ConfigError, match=r"runs_dir=/runs:1: must not contain ':' or ','"):
        script(job, in_container(image="x"))


def listener_from(port: int) -> socket.socket:
    """Listen at the first free port from this one on."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return listener_from(port + 1)


@pytest.mark.processes
def test_each_start_of_a_job_takes_a_free_port_that_linux_gives_to_no_connection() -> None:
    text = script(TRAIN, PLAIN)
    choose = text[text.index("for try in") : text.index("\nsrun ") + 1]

    def port(urandom: str) -> int:
        own = choose.replace("$(od -An -N2 -tu2 /dev/urandom)", urandom) + "echo $HLATCTL_MASTER_PORT"
        return int(subprocess.run(("bash", "-c", own), capture_output=True, text=True, check=True).stdout)

    ports = {port("$(od -An -N2 -tu2 /dev/urandom)") for _ in range(8)}
    assert len(ports) > 1
    assert all(20000 <= each < 32768 for each in ports)
    with listener_from(20000) as taken:
        number = taken.getsockname()[1]
        assert port(f"$(({number} - 20000 + try - 1))") != number


def test_a_job_names_the_environment_that_its_nodes_unpack_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[str, ...]] = []
    monkeypatch.setattr(launcher, "slurm", lambda *words: submitted.append(words))
    monkeypatch.setattr(Packer, "pack", lambda _, folder: {"archive": os.fspath(folder / "a.tar.gz")})
    job = dataclasses.replace(TRAIN, run_dir=tmp_path / "run", launch_dir=tmp_path / "launch", log_dir=tmp_path)
    cluster = dataclasses.replace(PLAIN, stage_environment=True, worker_cache_dir="/scratch/you")
    slurm = launcher.SlurmLauncher(cluster)
    slurm.submit(slurm.render(job))
    assert len(submitted) == 1
    record = tmp_path / "launch" / "train.environment"
    assert f"export HLATCTL_ENVIRONMENT={record}\n" in (tmp_path / "launch" / "train.sh").read_text()
    archive = os.fspath(tmp_path / ".cache" / "env" / "a.tar.gz")
    assert read_sealed_json(record) == {"archive": archive, "folder": "/scratch/you/env"}
    assert "HLATCTL_ENVIRONMENT" not in script(ONE, cluster), "one process gains nothing"
