"""A Trainium node by what its tools print: what is read from it, and what is said of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checks import Check
from hlatctl.run.errors import PreflightError
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.paths import RunPaths
from tests.conf.test_validate import config_with
from tests.trainer.neuron import samples
from trainer import preflight
from trainer.neuron import node, rounding_probe


def outcome(check: Check) -> tuple[str, str]:
    return check.status, check.shows


def test_devices_are_parsed_and_counted_in_logical_cores() -> None:
    parsed = node.parse_devices(samples.neuron_ls(2, logical_neuroncore_config=2, nc_count=4, memory_size=103079215104))
    assert [(d.index, d.cores, d.memory_bytes) for d in parsed] == [(0, 2, 103079215104), (1, 2, 34359738368)]


@pytest.mark.parametrize(
    ("text", "status", "shows"),
    [
        (samples.neuron_ls(), "pass", "16 devices, 32 NeuronCores, not in use"),
        (samples.neuron_ls(15), "fail", "30 NeuronCores on 15 devices, 32 are needed"),
        (samples.neuron_ls(0), "fail", "no Neuron device; is the driver loaded (lsmod | grep neuron)?"),
        (samples.neuron_ls(memory_size=1), "fail", "devices differ in cores or memory"),
        (
            samples.neuron_ls(neuron_processes=[{"pid": 7, "command": "python train.py"}]),
            "fail",
            "in use by process 7 python train.py on device 0",
        ),
    ],
)
def test_devices_are_checked(text: str, status: str, shows: str) -> None:
    assert outcome(node.check_devices(node.parse_devices(text), 32)) == (status, shows)


@pytest.mark.parametrize("text", ["", "table", "{}x", "[1]", '[{"neuron_device": 0}]', "3"])
def test_unknown_output_of_neuron_ls_is_an_error(text: str) -> None:
    with pytest.raises(node.ToolError, match="neuron-ls: its output can't be read"):
        node.parse_devices(text)


@pytest.mark.parametrize(
    ("line", "status", "shows"),
    [
        (samples.neuron_monitor(), "pass", "2 devices, 0 corrected ECC events, none uncorrected"),
        (
            samples.neuron_monitor({"sram_ecc_corrected": 3}),
            "pass",
            "2 devices, 3 corrected ECC events, none uncorrected",
        ),
        (samples.neuron_monitor({"sram_ecc_uncorrected": 1}), "fail", "device 1: sram_ecc_uncorrected=1"),
        (samples.neuron_monitor(hardware_errors=2), "fail", "process 4711: 2 hardware errors"),
        (samples.neuron_monitor(error="no driver"), "fail", "no driver"),
    ],
)
def test_error_counters_are_checked(line: str, status: str, shows: str) -> None:
    assert outcome(node.check_counters(line)) == (status, shows)


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"system_data": {"neuron_hw_counters": null}}'])
def test_unknown_output_of_neuron_monitor_is_an_error(line: str) -> None:
    with pytest.raises(node.ToolError, match="neuron-monitor: its output can't be read"):
        node.check_counters(line)


def test_bandwidth_is_read_by_size() -> None:
    assert node.parse_nccom(samples.NCCOM) == {1 << 20: 3.5, 1 << 28: 41.17}
    for text in ("", '{"results": []}', '{"results": [{}]}'):
        with pytest.raises(node.ToolError, match="nccom-test: its report"):
            node.parse_nccom(text)


def test_nccom_across_nodes_runs_in_the_slurm_job_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    words = node.nccom_command(64, 2, Path("r.json"), "17")
    assert " ".join(words).startswith("nccom-test -r 64 -N 2 --slurm-mode --slurm-job-id 17 allr -b 256MB")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert node.all_reduce(32, 2, 1.0, key="k").status == "skip"


@pytest.fixture
def tools_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder on PATH; programs in it replace Neuron's."""
    monkeypatch.setenv("PATH", os.pathsep.join([os.fspath(tmp_path), os.environ["PATH"]]))
    return tmp_path


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.processes
def test_the_tools_are_run_and_their_failures_shown(tools_on_path: Path) -> None:
    install(tools_on_path, "neuron-ls", f"cat <<'END'\n{samples.neuron_ls()}\nEND")
    install(tools_on_path, "neuron-monitor", f"echo '{samples.neuron_monitor()}'; exec sleep 60")
    install(tools_on_path, "nccom-test", f"for last; do :; done\necho '{samples.NCCOM}' > \"$last\"")
    assert node.find_devices(32).status == "pass"
    assert json.loads(node.tool_first_line("neuron-monitor", timeout_s=60))["instance_info"]
    slow = node.all_reduce(32, 1, 50.0, key="preflight.min_nccom_gib_per_s")
    assert outcome(slow) == ("fail", "all-reduce of 256MB: 41.2 GiB/s, below preflight.min_nccom_gib_per_s=50")
    assert node.all_reduce(32, 1, 40.0, key="k").values == {"nccom_gib_per_s": 41.17}
    install(tools_on_path, "nccom-test", "echo 'rank 3 mismatch' >&2; exit 1")
    assert outcome(node.all_reduce(32, 1, 1.0, key="k")) == ("fail", "nccom-test: exit code 1 (rank 3 mismatch)")


@pytest.mark.processes
def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setattr(node, "_BIN", os.fspath(tmp_path))
    config = config_with(backend__name="nxd", backend__device="neuron", preflight__min_nccom_gib_per_s=1.0)
    outcomes = {check.name: outcome(check) for check in node.look(config)}
    missing = f"not found on PATH or in {tmp_path}; install the package aws-neuronx-tools"
    assert outcomes["Neuron devices"] == ("fail", f"neuron-ls: {missing}")
    assert outcomes["Neuron error counters"] == ("fail", f"neuron-monitor: {missing}")
    assert outcomes["nccom-test in the node"] == ("skip", "the check of the Neuron devices failed")
    assert outcomes["ahead-of-time compiler"][1].endswith("install the package torch-neuronx")


def test_kernel_settings_are_compared_with_the_configuration(tmp_path: Path) -> None:
    ports, backlog = tmp_path / "ports", tmp_path / "somaxconn"
    ports.write_text("23456,41000,44000-44003\n")
    backlog.write_text("4096\n")
    assert node.reserved_ports([41000, 44002], ports).status == "pass"
    assert outcome(node.reserved_ports([41000, 48620], ports)) == (
        "fail",
        "48620 not reserved (preflight.reserved_ports); an administrator sets "
        "net.ipv4.ip_local_reserved_ports=41000,48620",
    )
    assert node.reserved_ports([1], tmp_path / "none").status == "skip"
    assert node.somaxconn(4096, backlog).status == "pass"
    assert node.somaxconn(65535, backlog).shows == "net.core.somaxconn=4096: below preflight.min_somaxconn=65535"
    assert node.open_files(10**9).shows.endswith("below preflight.min_open_files=1000000000")


def test_adapters_are_counted_by_their_driver(tmp_path: Path) -> None:
    for name, driver in (("rdmap160s26", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "adapters" / name / "device").mkdir(parents=True)
        (tmp_path / "adapters" / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert outcome(node.efa(1, tmp_path / "adapters")) == ("pass", "1: rdmap160s26")
    assert outcome(node.efa(8, tmp_path / "adapters")) == ("fail", "1 EFA adapters: below preflight.min_efa_devices=8")
    assert node.efa(0, tmp_path / "none").status == "pass"


@pytest.mark.parametrize(
    ("variables", "release", "status"),
    [
        ({"FI_PROVIDER": "efa"}, "5.10.238-aws", "fail"),
        ({"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"}, "5.10.238-aws", "pass"),
        ({"FI_PROVIDER": "efa"}, "6.8.0-1015-aws", "pass"),
        ({}, "5.10.238-aws", "pass"),
    ],
)
def test_old_kernels_need_fork_safety(variables: dict[str, str], release: str, status: str) -> None:
    assert node.fork_safety(variables, release).status == status


def test_nodes_that_differ_from_most_are_named_with_what_differs() -> None:
    same = {"driver": "2.27.4.0", "neuronx-cc": "2.24.8799.0"}
    by_host = {"a": same, "b": same, "c": {**same, "driver": "2.26.0.0"}, "d": {"neuronx-cc": "2.24.8799.0"}}
    assert preflight.disagreement(by_host) == {
        "c": "driver 2.26.0.0: 2 of 4 nodes have 2.27.4.0",
        "d": "driver none: 2 of 4 nodes have 2.27.4.0",
    }
    assert preflight.disagreement({"a": same, "b": dict(same)}) == {}


@pytest.mark.parametrize(
    ("installed", "problem"),
    [
        ({}, "backend.name=nxd: the package torch-neuronx is not installed"),
        ({"torch-neuronx": "2.9.0.2.13", "torch": "2.9.0"}, "backend.name=nxd: the package neuronx-distributed is not"),
        ({"torch-neuronx": "2.9.0.2.13", "torch": "2.9.0", "neuronx-distributed": "0.18"}, "the driver is not loaded"),
    ],
)
def test_missing_software_is_named(installed: dict[str, str], problem: str) -> None:
    config = config_with(backend__name="nxd", backend__device="neuron")
    assert node.check_software(config, installed).shows.startswith(problem)


def test_a_torchtitan_that_is_not_for_trainium_is_named() -> None:
    config = config_with(backend__name="torchtitan", backend__device="neuron")
    installed = {"torch-neuronx": "2.14.3.0", "torch": "2.14.0"}
    shows = node.check_software(config, installed).shows
    assert shows.startswith("backend.name=torchtitan with backend.device=neuron: torchtitan 0.3.0 is installed; AWS's")


@pytest.mark.processes
def test_the_loaded_driver_gives_its_version(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("2.27.4.0\n")
    assert node.installed_software(tmp_path / "version")["driver"] == "2.27.4.0"
    assert "driver" not in node.installed_software(tmp_path / "none")


def test_the_mean_shows_how_a_device_rounds() -> None:
    assert rounding_probe.measure(Config()) == 0.0, "this processor rounds to the nearest"
    assert rounding_probe.check_rounding(0.0, stochastic=False).status == "pass"
    assert rounding_probe.check_rounding(2**-10 + 1e-5, stochastic=True).status == "pass"
    assert rounding_probe.check_rounding(0.0, stochastic=True).shows == (
        "mean of 1 + 2^-10 in BF16 is 1 + 0.000000, not 1 + 0.000977: not rounded stochastically"
    )


def test_nodes_wait_for_each_other_and_report_their_own_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = (
        RunPaths(tmp_path),
        config_with(
            cluster__nodes=2, cluster__launcher="simulated", preflight__timeout_s=0.3, backend__device="neuron"
        ),
    )
    checks: list[Any] = [
        Check(name=node.SOFTWARE, status="pass", shows="", values={"driver": "2"}),
        Check(name="EFA adapters", status="fail", shows="0 EFA adapters: below preflight.min_efa_devices=8"),
    ]
    monkeypatch.setattr(node, "look", lambda config, across_nodes: iter(checks))
    monkeypatch.setattr("platform.node", lambda: "b")
    with pytest.raises(PreflightError, match="not every node was checked in that time; done: b"):
        preflight.check_node(config, run)
    same = {"name": node.SOFTWARE, "status": "pass", "shows": "", "command": "", "values": {"driver": "3"}}
    for other in ("a", "c"):
        files.write_json(run.preflight_nodes / f"{other}.json", {"v": 1, "host": other, "checks": [same]})
    with pytest.raises(PreflightError, match=r"node b: EFA adapters: 0 EFA adapters: below .*; and 1 more"):
        preflight.check_node(config, run)
    (worker,) = files.read_json(run.preflight)["workers"]
    assert (worker["host"], worker["failures"][1:]) == ("b", ["driver 2: 2 of 3 nodes have 3"])


def test_only_one_process_of_a_node_looks_at_the_records_of_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = RunPaths(tmp_path), config_with(cluster__nodes=1, backend__device="neuron")
    monkeypatch.setattr(node, "look", lambda config, across_nodes: iter(()))
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path))
    preflight.check_node(config, run)
    shutil.rmtree(run.preflight_nodes)
    monkeypatch.setenv("LOCAL_RANK", "1")
    preflight.check_node(config, run)  # the first process has told it
