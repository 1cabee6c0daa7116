"""What `runs`, `status`, `show` and `diff` print of complete, running, abandoned and damaged runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conf.load
from conf.schema import EvalGroupConfig
from hlatctl.cli.main import main
from hlatctl.run.journal import JournalWriter, to_line, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun

Cli = Callable[..., str]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command that must succeed and gives its stdout; its stderr is in ``cli.err`` of the capture."""

    def call(*argv: str) -> str:
        code = main(list(argv))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


def test_runs_lists_every_run(make_run: MakeRun, cli: Cli) -> None:
    make_run("one")
    make_run("two", until="killed", simulated=True)
    lines = [line.split("  ") for line in cli("runs").splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == ["RUN", "STATUS", "STEP", "TOKENS", "LOSS", "VALIDATION", "SCORES", "AGE"]
    assert {row[0]: row[1:4] for row in rows[1:]} == {
        "one": ["finished", "306/306", "2.51M"],
        "two": ["interrupted (SIMULATED)", "130/306", "1.06M"],
    }
    records = {record["run_id"]: record for record in json.loads(cli("runs", "--json"))}
    assert records["one"]["validation_loss"] == 3.51
    assert records["two"]["status"] == "interrupted"
    assert records["two"]["simulated"] is True


def test_no_run_is_no_error(cli: Cli) -> None:
    assert cli("runs") == ""
    assert cli("runs", "--json") == "[]\n"


def test_status_shows_how_a_finished_run_went(make_run: MakeRun, cli: Cli) -> None:
    make_run()
    text = cli("status", "latest")
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    facts = {name.strip(): value.strip() for name, value in rows.items()}
    assert facts["status"] == "finished"
    assert facts["step"] == "306 of 306 (100 %), 2.51M tokens"
    assert facts["checkpoints"] == "100, 306"
    assert facts["attempt 1"] == "from step 0 to 130: killed (step 100 is a valid checkpoint)"
    assert facts["at 2.51M"].startswith("smoke_mmlu 0.325 ± 0.068, smoke_humaneval 0.000, ")


def test_a_run_whose_driver_died_is_interrupted_and_can_be_resumed(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(until="killed")
    assert main(["status", "example", "--runs-dir", os.fspath(tmp_path / "runs")]) == 0
    captured = capsys.readouterr()
    assert "interrupted" in captured.out
    assert captured.err == "hint: `hlatctl resume example` continues the run (its driver is not running)\n"


def test_a_live_run_shows_its_process_and_that_it_is_stopping(make_run: MakeRun, cli: Cli) -> None:
    run = make_run(until="killed")
    with hold_driver(run):
        assert f"running (process {os.getpid()})" in cli("status", "example")
        with JournalWriter(run, "operator") as journal:
            journal.append("stop_requested", by="me")
        record = json.loads(cli("status", "example", "--json"))
    assert (record["status"], record["head_pid"]) == ("stopping", os.getpid())
    assert record["last_step"]["step"] == record["step"] == 130


def remove_config_content(run: RunPaths) -> None:
    run.config.write_bytes(b"\xff\xfe{")


def remove_journal(run: RunPaths) -> None:
    shutil.rmtree(run.journal)


def fill_journal_with_rubbish(run: RunPaths) -> None:
    (run.journal / "flow.jsonl").write_bytes(bytes(range(256)) * 20)


def cut_journal(run: RunPaths) -> None:
    path = run.journal / "train-rank00000.jsonl"
    path.write_bytes(path.read_bytes()[:-9])


def journal_is_a_file(run: RunPaths) -> None:
    shutil.rmtree(run.journal)
    run.journal.write_text("x", encoding="utf-8")


def strip_fields(run: RunPaths) -> None:
    head = {"v": 1, "time_unix_s": 1.7e9, "attempt": 1}
    events: list[dict[str, Any]] = [
        {**head, "seq": seq, "kind": kind}
        for seq, kind in enumerate(
            ["step", "milestone", "eval_finished", "checkpoint_written", "train_started"], start=1
        )
    ]
    events.append({**head, "seq": 9, "kind": "step", "step": 400, "tokens": 5})
    (run.journal / "train-rank00001.jsonl").write_bytes(b"".join(map(to_line, events)))


def provenance_is_rubbish(run: RunPaths) -> None:
    run.provenance.write_bytes(b"\xff")


DAMAGES = [
    remove_config_content,
    remove_journal,
    fill_journal_with_rubbish,
    cut_journal,
    journal_is_a_file,
    strip_fields,
    provenance_is_rubbish,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_reported_and_hides_no_other(
    damage: Callable[[RunPaths], None], make_run: MakeRun, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("whole")
    run = make_run("hurt")
    damage(run)
    assert {record["run_id"] for record in json.loads(cli("runs", "--json"))} == {"whole", "hurt"}
    assert "hurt" in cli("runs")
    assert "hurt" in cli("status", "hurt")
    json.loads(cli("status", "hurt", "--json"))
    for argv in (["show", "hurt"], ["show", "hurt", "--json"], ["diff", "hurt", "whole"], ["logs", "hurt"]):
        assert main(argv) in (0, 1, 10)
        assert "bug in hlatctl" not in capsys.readouterr().err


def test_show_prints_configuration_and_provenance(make_run: MakeRun, cli: Cli) -> None:
    import yaml

    make_run()
    config, provenance = yaml.safe_load_all(cli("show", "example"))
    assert config["train"]["seq_len"] == 512
    assert provenance["git"]["diff"] == "-a < b\n+a > b"
    record = json.loads(cli("show", "example", "--json"))
    assert record["config"] == config
    assert record["provenance"] == provenance


def test_diff_names_the_keys_that_differ(make_run: MakeRun, cli: Cli) -> None:
    make_run("one")
    two = make_run("two")
    assert cli("diff", "one", "two") == ""
    text = two.config.read_text(encoding="utf-8")
    two.config.write_text(text.replace("seq_len: 512", "seq_len: 256").replace("max_steps: null", "max_steps: 9"))
    assert json.loads(cli("diff", "one", "two", "--json")) == {
        "train.max_steps": [None, 9],
        "train.seq_len": [512, 256],
    }
    assert [line.split() for line in cli("diff", "one", "two").splitlines()] == [
        ["KEY", "one", "two"],
        ["train.max_steps", "null", "9"],
        ["train.seq_len", "512", "256"],
    ]


def test_diff_names_keys_that_only_one_of_the_runs_has(make_run: MakeRun, cli: Cli) -> None:
    one, two = make_run("one"), make_run("two")
    config = conf.load.load(two.config)
    groups = {"mmlu": EvalGroupConfig(tasks=["mmlu_anatomy"]), "math": EvalGroupConfig(tasks=["gsm8k"])}
    for run, names in ((one, ["mmlu"]), (two, ["math"])):
        chosen = {name: groups[name] for name in names}
        run.config.write_text(conf.load.dump(replace(config, eval=replace(config.eval, suite="x", groups=chosen))))
    rows = [line.split() for line in cli("diff", "one", "two").splitlines()]
    assert ["eval.groups.mmlu.tasks", "['mmlu_anatomy']", "-"] in rows
    assert ["eval.groups.math.tasks", "-", "['gsm8k']"] in rows
    forth, back = json.loads(cli("diff", "one", "two", "--json")), json.loads(cli("diff", "two", "one", "--json"))
    assert forth["eval.groups.math.tasks"] == [None, ["gsm8k"]]
    assert {key: values[::-1] for key, values in back.items()} == forth


def test_status_and_logs_show_what_the_newest_step_used(make_run: MakeRun, cli: Cli) -> None:
    run = make_run("one", until="killed")
    used: dict[str, Any] = {"mfu": 0.412, "memory_bytes": 3 << 30, "peak_memory_bytes": 7 << 30}
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("step", step=140, tokens=140, loss=3.0, lr=1e-3, tokens_per_s=100.0, step_s=1.0, **used)
    (row,) = (line for line in cli("status", "one").splitlines() if line.startswith("uses"))
    assert " ".join(row.split()) == "uses MFU 41.2%, memory 3 GiB, at most 7 GiB"
    assert json.loads(cli("status", "one", "--json"))["used"] == used
    assert ", MFU 41.2%, memory 7.00 GiB" in cli("logs", "one")


def test_an_attempt_that_has_not_begun_to_train_names_no_step(make_run: MakeRun, cli: Cli) -> None:
    run = make_run(until="killed")
    with JournalWriter(run, "flow", 2) as journal:
        journal.append("attempt_ended", cause="killed", evidence="", decision="restart", why="restarting from step 100")
        journal.attempt = 3
        journal.append("attempt_started", handle={"launcher": "local"})
    row = next(line for line in cli("status", run.run_id).splitlines() if line.startswith("attempt 3"))
    assert row.split(maxsplit=2)[2] == "has not begun to train"
    with JournalWriter(run, "flow", 3) as journal:
        journal.append("attempt_ended", cause="crashed", evidence="", decision="restart", why="restarting")
    row = next(line for line in cli("status", run.run_id).splitlines() if line.startswith("attempt 3"))
    assert row.split(maxsplit=2)[2] == "has not begun to train: crashed (restarting)"


def test_status_names_the_tasks_that_were_skipped(make_run: MakeRun, cli: Cli) -> None:
    make_run("one")
    lines = [" ".join(line.split()) for line in cli("status", "one").splitlines()]
    assert any(line.endswith("smoke_gsm8k: skipped, the model is too small") for line in lines)
