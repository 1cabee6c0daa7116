"""What `drill` refuses before anything is made, and its exit code. Real drills are in tests/e2e."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.devices import DEVICES
from flows import cluster_checks
from hlatctl import machine_checks
from hlatctl.cli.drill import show
from hlatctl.cli.main import main
from hlatctl.run.checks import Check
from hlatctl.run.errors import TrainingError
from hlatctl.run.journal import DRILL_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fault", "kill_hed"], "--fault=kill_hed: no such fault\nhint: did you mean kill_head?"),
        (["cluster=simulated"], "cluster.launcher=simulated: a drill disturbs real processes"),
        (["cluster=kubernetes"], "cluster.launcher=kubernetes: a drill disturbs real processes"),
        (
            ["--fault", "trackers_down", "--fault", "slow_process", "tracking=none", "cluster.processes_per_node=1"],
            "--fault=trackers_down: can't be injected, tracking.enabled=false\nhint: choose other faults with --fault",
        ),
        (["--fault", "gpu_lost"], "--fault=gpu_lost: can't be injected, needs a GPU\nhint: choose other faults"),
        (["train.tokenz=3"], "train.tokenz: unknown key"),
    ],
)
def test_a_drill_that_can_not_run_is_refused_before_anything_is_created(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", f"runs_dir={tmp_path / 'runs'}", *argv]) == 10
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_pool_is_listed_with_what_must_follow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cuda_ecc "))
    assert "device_failed" in row
    assert "restart without" in row
    assert main(["drill", "--list", "--json"]) == 0
    faults = {each["fault"]: each for each in json.loads(capsys.readouterr().out)["faults"]}
    assert faults["kill_process"]["by_default"]
    assert faults["lost_node"] == {
        "fault": "lost_node",
        "title": "a power cut of a node",
        "by_default": False,
        "needs": "a node's power",
        "cause": "node_failed",
        "blames_node": True,
        "action": "restart",
    }


def test_a_recovery_that_failed_is_an_error_which_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunPaths(tmp_path / "drilled")
    with JournalWriter(run, DRILL_WRITER) as journal:
        journal.append("drill_outcome", fault="kill_head", title="kill -9 of the head", failure="no head", skipped="")
    with pytest.raises(TrainingError, match="the run did not recover from: kill -9 of the head") as caught:
        show(run, as_json=False)
    assert os.fspath(tmp_path) in caught.value.hint
    assert "NOT RECOVERED: no head" in capsys.readouterr().out


def test_an_interrupted_drill_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> RunPaths:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.drill.exercise.exercise", interrupted)
    assert main(["drill", "--fault", "kill_process", f"runs_dir={tmp_path}"]) == 0
    assert "stopped: the drill was interrupted; its files are in " in capsys.readouterr().err


@pytest.mark.processes
def test_this_machine_is_looked_at_and_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", f"cluster.worker_cache_dir={tmp_path / 'cache'}", "--json"])
    checks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in checks] == [
        "python",
        "packages (head)",
        "packages (train)",
        "packages (eval)",
        "C++ compiler",
        "bubblewrap",
        "open files",
        "runs folder",
        "worker cache",
        "loopback",
    ]
    by_name = {check["name"]: check for check in checks}
    assert by_name["python"]["status"] == "pass"
    assert by_name["runs folder"]["values"]["free_bytes"] > 0
    assert code == (15 if any(check["status"] == "fail" for check in checks) else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_failed_check_sets_the_exit_code_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        Check(name="python", status="pass", shows="3.11"),
        Check(name="C++ compiler", status="fail", shows="g++: not found", command="g++ --version"),
    ]
    monkeypatch.setattr(machine_checks, "look", lambda config: iter(checks))
    assert main(["doctor"]) == 15
    captured = capsys.readouterr()
    assert captured.out == "pass  python: 3.11\nfail  C++ compiler: g++: not found\n"
    assert captured.err == (
        "error: 1 of 2 checks failed; the first: C++ compiler: g++: not found\n"
        "hint: run `g++ --version` to see the problem\n"
    )


@pytest.mark.processes
def test_missing_tools_folders_and_packages_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine_checks, "_ROLES", {"train": ("json", "no_such_package"), "eval": ("no_such_package",)})
    (tmp_path / "file").write_text("")
    config = compose(
        [
            "cluster=simulated",
            f"cluster.worker_cache_dir={tmp_path / 'file' / 'cache'}",
            "preflight.min_open_files=1000000000",
            "checkpoint.remote_url=bogus://x",
        ]
    )
    checks = {check.name: (check.status, check.shows) for check in machine_checks.look(config)}
    assert checks["packages (train)"] == ("fail", "no_such_package: not installed")
    assert checks["packages (eval)"] == ("skip", "not installed: this machine doesn't have this role")
    assert checks["C++ compiler"][0] == "skip"
    assert checks["bubblewrap"] == ("skip", "bwrap: not found; code tasks would be skipped")
    assert checks["C++ compiler"][1].endswith(" found; training would run uncompiled, which is slower")
    assert checks["open files"][1].endswith("below preflight.min_open_files=1000000000")
    assert checks["remote"][0] == "fail"
    assert checks["remote"][1].startswith("checkpoint.remote_url=bogus://x: ")
    assert checks["worker cache"] == ("fail", f"{tmp_path / 'file' / 'cache'}: can't be written (Not a directory)")


@pytest.mark.processes
@pytest.mark.parametrize("cluster", ["slurm", "kubernetes"])
def test_a_login_node_needs_no_tool_of_the_nodes(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    config = compose([f"runs_dir={tmp_path}", "preflight.min_open_files=1000000000"])
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, launcher=cluster))
    checks = {check.name: check for check in machine_checks.look(config)}
    assert [check.name for check in checks.values() if check.status == "fail"] == []
    assert checks["open files"].status == "skip"
    assert checks["open files"].shows.endswith("; only the nodes that run jobs need it")


def test_gpus_are_checked_where_their_driver_is_or_where_the_run_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(dataclasses.asdict(Check(name="GPUs", status="pass", shows="1 x NVIDIA H200")))
    monkeypatch.setattr(cluster_checks, "ask_about", lambda module, *_, **__: f"{line}\n")
    monkeypatch.setattr(machine_checks, "look", lambda config: iter(()))

    def checked(*argv: str) -> bool:
        assert main(["doctor", *argv]) == 0
        return "NVIDIA H200" in capsys.readouterr().out

    driver = tmp_path / "nvidiactl"
    device = dataclasses.replace(DEVICES["cuda"], files=(os.fspath(driver),))
    monkeypatch.setitem(DEVICES, "cuda", device)
    assert not checked()
    assert checked("backend.device=cuda")
    assert not checked("backend.device=cuda", "cluster=slurm"), "a login node has none"
    driver.touch()
    assert checked()


@pytest.mark.skipif(Path("/opt/aws/neuron/bin").exists(), reason="this machine has the Neuron tools")
@pytest.mark.processes
def test_the_checklist_of_a_node_stops_where_the_node_is_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_checks, "look", lambda config: iter(()))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["doctor", "--neuron", "cluster=simulated"]) == 15
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fail  Neuron devices: neuron-ls: not found on PATH or in /opt/aws/neuron/bin")
    assert lines[-2:] == [
        "skip  compile ahead, every graph found, 20 steps: skipped until this check passes: Neuron devices",
        "skip  killed and resumed: skipped until this check passes: Neuron devices",
    ]


@pytest.mark.processes
def test_a_machine_without_a_sandbox_says_which_tasks_it_will_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    usual = ["cluster=local", "eval=hlat", "eval.enabled=true"]
    warning = machine_checks.skipped_code_tasks(compose(usual))
    assert warning.startswith("humaneval: will be skipped, because ")
    assert "and bwrap: not found; install bubblewrap" in warning
    for others in (
        ["eval.enabled=false"],
        ["eval.code.allow_unsandboxed=true"],
        ["eval.tasks=[reading]"],
        ["cluster=simulated"],
    ):
        assert machine_checks.skipped_code_tasks(compose([*usual, *others])) == ""
