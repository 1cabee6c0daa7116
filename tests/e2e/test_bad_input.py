"""Wrong input gives one clear error with a hint and an exit code, no traceback, and creates no files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.compose import compose
from flows import pretrain
from tests.e2e.conftest import Call, Cli

pytestmark = pytest.mark.processes

#: Overrides, exit code, and what the message must say.
CASES = [
    (["train.tokenz=5"], 10, "train.tokenz: unknown key\nhint: did you mean train.tokens?"),
    (["experiment=quickstrat"], 10, "did you mean experiment=quickstart?"),
    (["train.global_batch_size=7"], 10, "train.global_batch_size=7: not divisible by the data-parallel size=2"),
    (["train.tokens=many"], 10, "train.tokens='many': is not a token count"),
    (["data.path=nowhere"], 11, "nowhere"),
    (["data.path=empty"], 11, "empty"),
    (["data.path=good.parquet", "data.text_column=body"], 11, "body"),
    (["data.path=truncated.parquet"], 11, "truncated.parquet"),
    (["tokenizer.path=nowhere.model"], 11, "nowhere.model"),
    (["eval.enabled=true", "eval.tasks=[smoke_mmul]"], 10, "did you mean smoke_mmlu?"),
    (["cluster=slrum"], 10, "cluster=slrum: no such option"),
    (["runs_dir=/proc/nowhere"], 14, "runs_dir=/proc/nowhere: can't be written"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "empty").mkdir()
    pq.write_table(pa.table({"text": ["a page of text"] * 200}), folder / "good.parquet")
    whole = (folder / "good.parquet").read_bytes()
    (folder / "truncated.parquet").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.mark.parametrize(("overrides", "exit_code", "says"), CASES)
def test_bad_input_gives_one_error_with_a_hint_and_creates_nothing(
    cli: Cli, call: Call, inputs: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], exit_code: int, says: str
) -> None:
    monkeypatch.chdir(inputs)
    before = sorted(cli.runs_dir.rglob("*")) if cli.runs_dir.exists() else []
    result = call("train", *cli.overrides, *overrides)
    assert result.returncode == exit_code, result.stderr
    assert says in result.stderr
    assert "error: " in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert (sorted(cli.runs_dir.rglob("*")) if cli.runs_dir.exists() else []) == before


@pytest.fixture(scope="module")
def existing(cli: Cli) -> str:
    config = compose([*cli.overrides, "cluster=simulated", f"runs_dir={cli.runs_dir}"])
    return pretrain.create(config, argv=[], run_id="existing").run_id


def test_a_run_id_that_exists_is_refused(cli: Cli, call: Call, existing: str) -> None:
    result = call("train", "--run-id", existing, *cli.overrides)
    assert result.returncode == 12
    assert f"--run-id={existing}: exists" in result.stderr


@pytest.mark.parametrize("command", ["status", "logs", "stop", "resume", "show"])
def test_an_unknown_run_is_named_with_the_nearest(call: Call, existing: str, command: str) -> None:
    result = call(command, "existnig")
    assert result.returncode == 13
    assert "existnig: no run of that name" in result.stderr
    assert "did you mean existing?" in result.stderr


def test_a_read_only_runs_folder_is_refused(cli: Cli, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; /proc in the table above stands for it")
    tmp_path.chmod(0o500)
    assert cli.run("train", *cli.overrides, f"runs_dir={tmp_path}").returncode == 14


def test_too_little_disk_fails_preflight_with_both_numbers(cli: Cli) -> None:
    huge = ["model.hidden_size=65536", "model.num_layers=1000", "model.num_heads=512", "model.num_kv_heads=512"]
    result = cli.run("train", "--run-id", "too-big", *cli.overrides, *huge)
    assert result.returncode == 15, result.stderr
    assert "free" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_named(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = cli.run("ui", "--prefect-port", str(port))
    assert result.returncode == 16, result.stderr
    assert str(port) in result.stderr
    assert "--prefect-port" in result.stderr
