"""Logs: the newest attempt's, one rank's, and following over a restart until the run has ended."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from conf.schema import ClusterConfig, Config
from hlatctl.cli import common
from hlatctl.cli import logs as logs_command
from hlatctl.cli.logs import JournalLines
from hlatctl.cli.main import main
from hlatctl.driver_job import DriverJob
from hlatctl.run.journal import JournalWriter, eval_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.hlatctl.cli.conftest import FakeSlurm
from tests.hlatctl.conftest import MakeRun
from tests.waiting import WAIT_S


@pytest.fixture
def run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    run = make_run(until="killed")
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(run.root.parent))
    monkeypatch.setattr(logs_command, "_POLL_S", 0.01)
    return run


def write(run: RunPaths, attempt: int, name: str, text: str) -> Path:
    path = run.logs(attempt) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    return path


def test_the_newest_attempts_log_is_printed(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, "train.log", "old\n")
    write(run, 2, "train.log", "new ü\nwithout an end")
    assert main(["logs", "example"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(
        " UTC  evaluation at 833.3K tokens: finished: smoke_mmlu 0.250, "
        "smoke_humaneval 0.000, validation_loss 4.310 (and 1 more)\n"
        "new ü\nwithout an end"
    )
    assert captured.err == "==> journal <==\n==> attempt-0002/train.log <==\n"


def test_a_run_whose_processes_print_nothing_shows_stages_steps_and_evaluations(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 1, "train.log", "")
    assert main(["logs", "example"]) == 0
    lines = [line.split("UTC  ")[1] for line in capsys.readouterr().out.splitlines()]
    for line in (
        "stage data: started",
        "stage data: finished in 7.9 s",
        "stage warm_cache: skipped, no graphs were compiled",
        "attempt 1: started",
        "checkpoint of step 100: written",
        "evaluation at 833.3K tokens: started",
    ):
        assert line in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert [step.split(":")[0] for step in steps] == ["step 1", *(f"step {n}" for n in range(10, 131, 10))]
    assert steps[1] == "step 10: loss 7.7885, gradient norm 0.999, lr 7.50e-04, 16,384 tokens/s, 0.5 s/step"


def test_the_events_of_one_rank_are_shown(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "example", "--rank", "0"]) == 0
    kinds = {line.split("UTC  ")[1].split()[0] for line in capsys.readouterr().out.splitlines()}
    assert kinds == {"attempt", "step", "checkpoint"}
    write(run, 1, "ranks/attempt_0/1/stdout.log", "")
    assert main(["logs", "example", "--rank", "1"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "rank 1 has printed nothing\n")


def test_of_a_long_journal_the_newest_part_is_read(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hlatctl.cli.logs._RECENT_BYTES", 2500)
    assert main(["logs", "example", "--rank", "0"]) == 0
    lines = [line.split("UTC  ")[1].split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 122", "step 130", "checkpoint of step 100"]


def test_each_tenth_of_an_evaluation_s_task_is_printed_once(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    about: dict[str, Any] = {"milestone_tokens": 1000, "contract": "c"}
    with JournalWriter(run, eval_writer(1000)) as journal:
        journal.append("eval_task_started", task="gsm8k", **about)
        for done in range(0, 101, 2):
            journal.append("eval_progress", task="gsm8k", done=done, total=100, **about)
    lines = [line.split("UTC  ")[1] for line in JournalLines(run).read_new()]
    assert lines[:3] == [
        "evaluation at 1K tokens: gsm8k",
        "evaluation at 1K tokens: gsm8k, 0 of 100 requests",
        "evaluation at 1K tokens: gsm8k, 10 of 100 requests",
    ]
    assert len(lines) == 12


def test_an_event_of_a_newer_version_has_a_line_of_its_values(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    with JournalWriter(run, "flow") as journal:
        journal.append("expert_moved", expert=3, to="node-7", loads=[1, 2])
        journal.append("expert_lost", expert=3, message="node-7 is gone")
    lines = [line.split("UTC  ")[1] for line in JournalLines(run).read_new()]
    assert lines == ["expert_moved: expert 3, to node-7", "expert_lost: node-7 is gone"]


def test_a_simulated_run_says_so_first(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("played", simulated=True)
    run.config.write_text(run.config.read_text().replace("launcher: local", "launcher: simulated"))
    assert main(["logs", "played", "--runs-dir", os.fspath(run.root.parent)]) == 0
    assert capsys.readouterr().err.startswith("SIMULATED: nothing is trained, and every number is made up\n")


def test_a_run_without_logs_says_so(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.journal)
    assert main(["logs", "example"]) == 1
    assert capsys.readouterr().err.startswith("error: run example: no logs yet in ")


def test_one_rank_is_found_by_its_folder(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, "ranks/attempt_0/0/stdout.log", "rank zero\n")
    write(run, 1, "ranks/attempt_0/1/stdout.log", "rank one\n")
    assert main(["logs", "example", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "rank one\n"
    assert main(["logs", "example", "--rank", "7"]) == 1
    assert "no output of rank 7 yet" in capsys.readouterr().err


def test_a_rank_of_several_nodes_is_found_by_its_number_in_the_whole_job(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    for node, local in ((0, 0), (0, 1), (1, 0), (1, 1)):
        place = f"train/node-{node}/none_x{node}/attempt_0/{local}/stdout.log"
        write(run, 1, place, f"node {node}, local rank {local}\n")
    for rank, expected in ((0, "node 0, local rank 0\n"), (2, "node 1, local rank 0\n")):
        assert main(["logs", "example", "--rank", str(rank), "--attempt", "1"]) == 0
        assert capsys.readouterr().out == expected
    assert main(["logs", "example", "--rank", "4"]) == 1


def test_a_ranks_lines_are_taken_from_the_log_of_its_node(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_command, "_BLOCK_BYTES", 7)
    monkeypatch.setattr("conf.of_run.of_run", lambda _: Config(cluster=ClusterConfig(nodes=12, processes_per_node=2)))
    write(run, 1, "train.log", "[rank0]: first\ntorchrun's own\n[rank1]: second\n")
    write(run, 1, "train.node-1.log", "[rank2]: third\n[rank23]: not here\n")
    write(run, 1, "train.node-11.log", "[rank23]: ü 1\n[rank22]: other\n[rank23]: ü 2\n[rank23]: without an end")
    for rank, expected in ((0, "first\n"), (2, "third\n"), (23, "ü 1\nü 2\n"), (8, "")):
        code = main(["logs", "example", "--attempt", "1", "--rank", str(rank)])
        assert (code, capsys.readouterr().out) == (0 if expected else 1, expected)
    assert main(["logs", "example", "--attempt", "1"]) == 0
    assert "third" not in capsys.readouterr().out


def test_the_output_of_an_earlier_attempt_is_printed(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, "train.log", "the first\n")
    write(run, 2, "train.log", "the second\n")
    assert main(["logs", "example", "--attempt", "1"]) == 0
    assert capsys.readouterr().out == "the first\n"
    assert main(["logs", "example", "--attempt", "3"]) == 1
    assert "no logs yet in" in capsys.readouterr().err


def test_following_continues_over_a_restart_and_ends_with_the_run(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 1, "train.log", "first\n")
    codes: list[int] = []
    shown = threading.Event()
    print_ = common.write

    def noting(message: str = "", **how: Any) -> None:
        print_(message, **how)
        if message == "first\n":
            shown.set()

    with pytest.MonkeyPatch.context() as patch, hold_driver(run):
        patch.setattr(logs_command, "write", noting)
        follower = threading.Thread(target=lambda: codes.append(main(["logs", "example", "-f"])))
        follower.start()
        assert shown.wait(WAIT_S)
        write(run, 1, "train.log", "second\n")
        write(run, 2, "train.log", "third\n")
        assert follower.is_alive()
    follower.join(WAIT_S)
    assert codes == [0]
    out = capsys.readouterr().out
    assert out.index("evaluation at") < out.index("first\n") < out.index("third\n")
    assert out.endswith("third\n")


@pytest.mark.processes
def test_following_ends_when_all_jobs_that_would_drive_the_run_were_cancelled(
    run: RunPaths, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DriverJob(launcher="slurm", token="t").write(run.driver_job)
    monkeypatch.setattr(logs_command, "_ASK_S", 0.01)
    codes: list[int] = []
    follower = threading.Thread(target=lambda: codes.append(main(["logs", "example", "-f"])))
    follower.start()
    follower.join(0.3)
    assert follower.is_alive(), "a job waits"
    slurm.forget()
    follower.join(WAIT_S)
    assert codes == [0]
    assert "`hlatctl resume example --driver slurm` submits one" in capsys.readouterr().err


def test_a_log_can_not_command_the_terminal(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, "train.log", "\x1b[32mok\x1b[0m\n10%\r20%\r\n\x1b]52;c;aGk=\x07\u202e\x9b2J\n")
    assert main(["logs", "example", "--attempt", "1"]) == 0
    assert capsys.readouterr().out == "ok\n10%\n20%\n\\x1b]52;c;aGk=\\x07\\u202e\\x9b2J\n"


def test_a_character_that_is_written_in_two_parts_is_printed_correctly(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes("one\ntwo ü".encode()[:-1])
    printer = logs_command._Printer(RunPaths(tmp_path), None)
    assert "".join(printer._read_new(path, None)) == "one\ntwo "
    path.write_bytes("one\ntwo ü\n".encode())
    assert "".join(printer._read_new(path, None)) == "ü\n"


def test_a_stage_s_output_of_all_attempts_is_printed(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 0, "data.log", "prepared\n")
    write(run, 0, "eval-10240.log", "mmlu\n")
    write(run, 1, "train.log", "[rank0]: step 10\n[rank1]: other\n")
    write(run, 2, "train.node-3.log", "[rank24]: step 20\n")
    (run.root / "logs" / "driver.log").write_text("2026-01-01 00:00:00 UTC  data: done\n", encoding="utf-8")
    for arguments, expected in (
        (("--stage", "driver"), ["2026-01-01 00:00:00 UTC  data: done"]),
        (("--stage", "eval"), ["mmlu"]),
        (("--stage", "train"), ["[rank0]: step 10", "[rank1]: other", "[rank24]: step 20"]),
        (("--stage", "train", "--attempt", "1", "--rank", "0"), ["step 10"]),
    ):
        assert main(["logs", "example", *arguments]) == 0
        assert capsys.readouterr().out.splitlines() == expected
    assert main(["logs", "example", "--stage", "compile"]) == 1
    assert "it has that of: data, driver, eval, train" in capsys.readouterr().err


def test_everything_is_the_journal_and_every_log(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 0, "data.log", "prepared\n")
    write(run, 1, "train.node-3.log", "[rank24]: step 20\n")
    assert main(["logs", "example", "--all"]) == 0
    out = capsys.readouterr().out
    assert "prepared\n" in out
    assert "[rank24]: step 20\n" in out
