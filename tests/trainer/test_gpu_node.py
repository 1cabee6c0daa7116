"""A node's GPUs by what stand-ins of NVML and AMD SMI tell of them, and what is measured of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.load import dump
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checks import Check
from hlatctl.run.errors import PreflightError, install, load_error
from hlatctl.run.paths import RunPaths
from tests.conf.test_validate import config_with
from tests.trainer.conftest import ROOT, Finish, MakeRun, Start
from trainer import gpu_node, preflight

LIBRARIES = Path(__file__).parent / "gpu_libraries"


def outcome(check: Check) -> tuple[str, str]:
    return check.status, check.shows


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """Check a node with such GPUs; two processes unless said otherwise."""
    monkeypatch.syspath_prepend(os.fspath(LIBRARIES))
    for name in ("pynvml", "amdsmi"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "kmsg").write_text("")
    monkeypatch.setattr(gpu_node, "_KERNEL_LOG", tmp_path / "kmsg")

    def checks(gpus: Any, processes: int = 2, **changes: Any) -> dict[str, Check]:
        monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))
        config = config_with(backend__device="cuda", cluster__processes_per_node=processes, **changes)
        return {check.name: check for check in gpu_node.look(config)}

    return checks


def test_healthy_gpus_pass_and_are_described(look: Callable[..., dict[str, Check]]) -> None:
    checks = look([{}, {"NvLinkErrorCounter": 1}])
    assert {name: outcome(check) for name, check in checks.items()} == {
        "GPUs": ("pass", "2 x NVIDIA H100 80GB HBM3, driver 550.54.15"),
        "GPU memory": ("pass", "no uncorrected errors on 2 GPUs"),
        "GPU links": ("pass", "18 on each GPU, 54 repaired errors"),
        "GPU clocks": ("pass", "at most 41 degrees Celsius"),
        "GPU faults": ("pass", "none"),
    }
    assert checks["GPUs"].values == {"GPU": "NVIDIA H100 80GB HBM3", "driver": "550.54.15", "NVLinks": "18"}
    assert checks["GPU clocks"].values["GPU 1"]["clock_mhz"] == 345


@pytest.mark.parametrize(
    ("gpu", "name", "shows"),
    [
        ({"Handle": "GpuIsLost"}, "GPUs", "GPU 1 (identity unknown): can't be used (GPU is lost)"),
        ({"RemappedRows": "ResetRequired"}, "GPUs", "GPU 1 (GPU-00000001): can't be used (GPU requires restart)"),
        ({"RecoveryAction": 2}, "GPUs", "GPU 1 (GPU-00000001): the driver wants one to reboot the node"),
        (
            {"TotalEccErrors": 3},
            "GPU memory",
            "GPU 1 (GPU-00000001): 3 uncorrected memory errors; reset the GPU, and replace it if they come back",
        ),
        (
            {"RemappedRows": [0, 2, 1, 1]},
            "GPU memory",
            "GPU 1 (GPU-00000001): a bad row of its memory can't be replaced; replace the GPU",
        ),
        ({"NvLinkState": [1] * 17 + [0]}, "GPU links", "GPU 1 (GPU-00000001): 17 of 18 NVLinks are active"),
        (
            {"CurrentClocksEventReasons": 0x48},
            "GPU clocks",
            "GPU 1 (GPU-00000001): slowed down: too hot (hardware), hardware slowdown",
        ),
        (
            {"CurrentClocksEventReasons": 0x80},
            "GPU clocks",
            "GPU 1 (GPU-00000001): slowed down: power brake of the node",
        ),
    ],
)
def test_a_broken_gpu_is_named_with_its_fault(
    look: Callable[..., dict[str, Check]], gpu: dict[str, Any], name: str, shows: str
) -> None:
    checks = look([{}, gpu])
    assert [(check.name, *outcome(check)) for check in checks.values() if check.status == "fail"] == [
        (name, "fail", shows)
    ]
    assert all(check.status != "fail" for check in look([{}, gpu], processes=1).values()), "it isn't used"


def test_what_a_gpu_or_a_permission_withholds_is_no_failure(look: Callable[..., dict[str, Check]]) -> None:
    names = ("TotalEccErrors", "RemappedRows", "CurrentClocksEventReasons", "NvLinkState", "Temperature", "UUID")
    withheld = {**dict.fromkeys(names, "NoPermission"), "RecoveryAction": "NotSupported", "Name": "Unknown"}
    checks = look([withheld], processes=1)
    assert {name: check.status for name, check in checks.items()} == {
        "GPUs": "pass",
        "GPU memory": "skip",
        "GPU links": "skip",
        "GPU clocks": "pass",
        "GPU faults": "pass",
    }
    assert "ECC: Insufficient Permissions" in checks["GPU memory"].values["unread"]


def test_a_row_that_waits_for_a_reset_and_links_that_no_gpu_has_are_no_failures(
    look: Callable[..., dict[str, Check]],
) -> None:
    checks = look([{"RemappedRows": [1, 0, 1, 0], "NvLinkState": [0] * 18}, {"NvLinkState": [0] * 18}])
    shows = "no uncorrected errors on 2 GPUs; a row is replaced at the next reset: GPU 0 (GPU-00000000)"
    assert outcome(checks["GPU memory"]) == ("pass", shows)
    assert outcome(checks["GPU links"]) == ("pass", "0 on each GPU, 0 repaired errors")


def test_a_missing_gpu_fails_and_a_missing_library_does_not(
    look: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "1 of the 2 GPUs of cluster.processes_per_node=2 are here"
    assert outcome(look([{}])["GPUs"]) == ("fail", few)
    no_driver = look({"init": "LibraryNotFound"})
    assert [outcome(check) for check in no_driver.values()] == [
        ("skip", "NVML can't be used (NVML Shared Library Not Found)")
    ]
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    (check,) = look([{}]).values()
    assert check.status == "skip"
    assert install("gpu") in check.shows


@pytest.mark.parametrize(
    ("visible", "failing"), [(None, 0), ("1,3", 2), ("3,2", 1), ("GPU-00000001", 1), ("MIG-1", 2), ("", 1)]
)
def test_only_gpus_of_the_job_count(
    look: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch, visible: str | None, failing: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    checks = look([{}, {"TotalEccErrors": 1}, {}, {"TotalEccErrors": 1}], processes=1 if visible is None else 2)
    found = checks["GPU memory"].shows.count("uncorrected memory errors") + (checks["GPUs"].status == "fail") * (
        visible == ""
    )
    assert found == failing


def test_recent_faults_of_the_jobs_gpus_are_read_from_the_kernels_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up_s = 90_000.0  # this machine may have started a minute ago
    monkeypatch.setattr(gpu_node, "time", SimpleNamespace(monotonic=lambda: up_s))
    gpus = [gpu_node.Health(index=0, identity="GPU-0", bus="0000:3b:00")]

    def record(age_s: float, text: str) -> str:
        return f"4,1,{int((up_s - age_s) * 1e6)},-;NVRM: Xid {text}\n"

    log = tmp_path / "kmsg"
    log.write_text(
        record(60, "(PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault")
        + record(60, "(PCI:0000:5e:00): 79, pid='<unknown>', GPU has fallen off the bus.")
        + record(7200, "(PCI:0000:3b:00): 95, pid=7, Uncontained ECC error")
    )
    check = gpu_node.check_kernel_log(gpus, log)
    assert outcome(check) == ("pass", "none in the last hour, 1 before")
    log.write_text(record(120, "(PCI:0000:3b:00): 119, pid=7, Timeout waiting for RPC from GSP!"))
    shows = "GPU 0 (GPU-0): Xid 119 2 min ago; see NVIDIA's Xid catalog for what helps"
    assert outcome(gpu_node.check_kernel_log(gpus, log)) == ("fail", shows)
    assert gpu_node.check_kernel_log(gpus, tmp_path / "none").status == "skip"


def test_dcgms_results_are_read_in_both_forms(look: Callable[..., dict[str, Check]], tmp_path: Path) -> None:
    old = {
        "DCGM GPU Diagnostic": {
            "test_categories": [
                {
                    "category": "Deployment",
                    "tests": [{"name": "Denylist", "results": [{"gpu_ids": "0", "status": "Pass"}]}],
                }
            ]
        }
    }
    assert outcome(gpu_node.check_dcgm(f"done\n{json.dumps(old)}", "dcgmi")) == ("pass", "1 tests, none failed")
    warnings = [{"error_id": 29, "warning": "Persistence mode for GPU 1 is disabled."}]
    results = [{"entity_id": 0, "status": "Pass"}, {"entity_id": 1, "status": "Fail", "warnings": warnings}]
    new = {"DCGM Diagnostic": {"test_categories": [{"tests": [{"name": "software", "results": results}]}]}}
    shows = "software: GPU 1: failed (Persistence mode for GPU 1 is disabled.)"
    assert outcome(gpu_node.check_dcgm(json.dumps(new), "dcgmi")) == ("fail", shows)
    for text in ("", "Error: unable to establish a connection to the specified host: localhost", "{"):
        assert gpu_node.check_dcgm(text, "dcgmi").status == "skip"
    assert "DCGM" not in look([{}, {}])
    assert outcome(look([{}, {}], preflight__dcgm_level=1)["DCGM"]) == ("skip", "dcgmi: not found on PATH")


def test_amds_gpus_are_read_by_amds_library(
    look: Callable[..., dict[str, Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_node.runtime() == {"ROCm": "6.4.43484"}
    checks = look([{"violations": "error"}, {"bdf": "0000:22:00.0", "ecc": {"uncorrectable_count": 2}}])
    assert outcome(checks["GPUs"]) == ("pass", "2 x AMD Instinct MI300X, driver 6.12.12")
    assert checks["GPU memory"].shows.startswith("GPU 1 (0000:22:00.0): 2 uncorrected memory errors")
    hot = look([{}, {"violations": {"active_hbm_thrm": True}}])
    assert hot["GPU clocks"].shows == "GPU 1 (0000:0c:00.0): slowed down: too hot (memory)"
    assert "GPU faults" not in hot
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    (check,) = look([]).values()
    assert (check.status, "pip install /opt/rocm/share/amd_smi" in check.shows) == ("skip", True)


def test_workers_far_below_the_median_are_named_and_others_are_not() -> None:
    def workers(*speeds: float) -> list[dict[str, Any]]:
        return [{"rank": rank, "gpu_tflops_per_s": speed} for rank, speed in enumerate(speeds)]

    config = Config()
    assert preflight.below_median(config, workers(700, 690, 650, 500)) == {
        3: ["gpu_tflops_per_s=500: 72% of the job's median of 690, less than preflight.min_median_fraction=0.8"]
    }
    assert list(preflight.below_median(config, workers(700, 300))) == [1]
    assert preflight.below_median(config, [{"rank": 0}]) == {}
    assert preflight.below_median(config_with(preflight__min_median_fraction=0.0), workers(700, 1)) == {}


@pytest.mark.processes
def test_a_preflight_names_the_node_and_the_gpu_before_it_uses_the_gpus(
    tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, error_file: Path
) -> None:
    run: RunPaths = make_run(tmp_path / "run", backend={"device": "cuda"}, cluster={"processes_per_node": 2})
    env = {
        "PYTHONPATH": os.pathsep.join((os.fspath(ROOT), os.fspath(LIBRARIES))),
        "FAKE_GPUS": json.dumps([{}, {"TotalEccErrors": 3}]),
        "HLATCTL_NODE_NAME": "n1",
    }
    output = finish(start("trainer.preflight", "--run-dir", os.fspath(run.root), **env), PreflightError.exit_code)
    assert "n1: pass  GPU links: 18 on each GPU" in output
    error = load_error(error_file)
    assert isinstance(error, PreflightError)
    expected = "node n1: GPU memory: GPU 1 (GPU-00000001): 3 uncorrected memory errors"
    assert error.message.startswith(expected)
    (worker,) = files.read_json(run.preflight)["workers"]
    assert (worker["host"], worker["rank"]) == ("n1", None)


def test_the_checks_of_a_machine_say_first_whether_pytorch_fits_its_driver(
    look: Callable[..., dict[str, Check]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``hlatctl doctor`` shows them. Only GPUs that the configuration needs can fail it for PyTorch's sake."""

    def shown(**changes: Any) -> dict[str, tuple[str, str]]:
        (tmp_path / "config.yaml").write_text(dump(config_with(cluster__processes_per_node=4, **changes)))
        assert gpu_node.main(["--config", os.fspath(tmp_path / "config.yaml")]) == 0
        checks = [Check(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
        return {check.name: outcome(check) for check in checks}

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system\nis too old (found version 12040).")

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    ((name, (status, shows)),) = shown().items()
    assert (name, status) == ("PyTorch for GPUs", "skip")
    assert "can't use this machine's GPUs (The NVIDIA driver on your system is too old (found version 12040))" in shows
    assert shows.endswith("; install the build for the driver's version (https://pytorch.org/get-started/locally)")

    look([{}, {"TotalEccErrors": 3}])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    checks = shown()
    assert checks["GPUs"] == ("pass", "2 x NVIDIA H100 80GB HBM3, driver 550.54.15")
    assert checks["GPU memory"][0] == "fail"
    checks = shown(backend__device="cuda")
    assert checks["PyTorch for GPUs"][0] == "fail"
    assert checks["GPUs"] == ("fail", "2 of the 4 GPUs of cluster.processes_per_node=4 are here")
