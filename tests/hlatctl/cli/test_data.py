"""`hlatctl data`, with the real processes behind it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import conf.load
from conf.fingerprint import data_fingerprint
from conf.schema import ClusterConfig, Config, DataConfig, EvalConfig, ModelConfig, TokenizerConfig, TrainConfig
from flows.runtime.context import cache_root
from flows.runtime.programs import ask_about
from hlatctl.cli.main import main
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.journal import JournalWriter, read_events, train_writer
from hlatctl.run.paths import RunPaths

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
_KEYS = ["tokenizer.train_vocab_size=300", "model.vocab_size=300", "train.seq_len=128", "cluster.processes_per_node=1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "words.jsonl"
    lines = [json.dumps({"text": f"document {i} has " + f"some words {i} " * (i % 40 + 1)}) for i in range(120)]
    path.write_text("\n".join([*lines[:60], "{torn", *lines[60:]]) + "\n")
    return path


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run whose corpus is prepared, in a runs folder that tests copy."""
    run = _create(tmp_path_factory.mktemp("prepared"), corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.fspath(ROOT))
        _prepare(run)
    return run


@pytest.fixture
def run(corpus: Path, prepared: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run whose corpus is prepared, and which has trained nothing."""
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path))
    shutil.copytree(prepared.root.parent, tmp_path, dirs_exist_ok=True)
    return _create(tmp_path, corpus)


def _create(runs_dir: Path, corpus: Path) -> RunPaths:
    config = Config(
        runs_dir=os.fspath(runs_dir),
        model=ModelConfig(vocab_size=300),
        eval=EvalConfig(enabled=False),
        data=DataConfig(path=os.fspath(corpus), on_corrupt="skip"),
        tokenizer=TokenizerConfig(train_vocab_size=300),
        train=TrainConfig(tokens=100 * 8 * 128, seq_len=128),
    )
    run = RunPaths(runs_dir / "the-run")
    files.write_text(run.config, conf.load.dump(config))
    run.journal.mkdir(exist_ok=True)
    return run


def _prepare(run: RunPaths) -> None:
    """As the flow's data stage does, for a run that has no corpus yet."""
    config = conf.load.load(run.config)
    folder = cache_root(config) / "data" / data_fingerprint(config)
    ask_about("trainer.data.prepare", config, "--to", os.fspath(folder))
    if not run.dataset.exists():
        files.write_json(run.dataset, files.read_json(folder / "dataset.json"))


def _amendments(run: RunPaths) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == "data_changed"]


def test_inspect_prepares_and_shows_a_corpus(run: RunPaths, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"data.path={corpus}", "data.on_corrupt=skip", *_KEYS]
    assert main(["data", "inspect", *overrides, "--json"]) == 0
    captured = capsys.readouterr()
    survey = json.loads(captured.out)
    assert (survey["corrupt_count"], survey["sources"][0]["rows"]) == (1, 120)
    assert survey["documents"] + survey["validation_documents"] == 120
    assert main(["data", "inspect", *overrides, "--documents", "10"]) == 0
    text = capsys.readouterr().out
    assert f"{survey['documents']:,} documents for training" in text
    assert "(estimated from 10 documents)" in text
    assert "1 damaged rows or stretches" in text
    assert f"{corpus}:61: not a JSON value" in text
    assert "some words" in text.split("the beginning of the first packed sequence:")[1]


def test_inspect_refuses_what_train_would(run: RunPaths, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", f"data.path={corpus}", *_KEYS, "data.text_column=body"]) == 11
    assert "data.text_column='body' is not there" in capsys.readouterr().err
    assert main(["data", "inspect", f"data.path={corpus}", *_KEYS]) == 11
    error = capsys.readouterr().err
    assert "words.jsonl:61: not a JSON value" in error
    assert error.count("error: ") == 1


def test_at_names_file_and_row_of_every_document(
    run: RunPaths, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "at", "the-run", "--step", "3", "--json"]) == 0
    captured = capsys.readouterr()
    assert "step 3: replaying 3 batches from the start" in captured.err
    sequences = json.loads(captured.out)["sequences"]
    assert [sum(d["tokens"] for d in sequence) for sequence in sequences] == [128] * 8
    lines = corpus.read_text().splitlines()
    for document in (d for sequence in sequences for d in sequence):
        assert json.loads(lines[document["row"] - 1])["text"].startswith(document["text"])
    assert main(["data", "at", "the-run", "--step", "3"]) == 0
    assert f"{corpus}:{sequences[0][0]['row']}" in capsys.readouterr().out
    assert main(["data", "at", "the-run", "--step", "300"]) == 10
    assert "--step=300: the run has steps 1 to 100" in capsys.readouterr().err


def test_tokenize_writes_ids_that_inspect_reads(
    run: RunPaths, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"data.path={corpus}", "data.on_corrupt=skip", *_KEYS]
    to = tmp_path / "ids"
    assert main(["data", "tokenize", "--to", os.fspath(to), "--processes", "1", *overrides]) == 0
    hint = capsys.readouterr().err.splitlines()[-1].split()
    assert hint[:3] == ["hlatctl", "train", f"data.path={to}"]
    assert main(["data", "inspect", hint[2], *_KEYS, "--json"]) == 0
    survey = json.loads(capsys.readouterr().out)
    text = files.read_json(next((tmp_path / ".cache" / "data").glob("*/dataset.json")))
    assert survey["documents"] + survey["validation_documents"] == 120
    assert survey["fingerprint"] == text["fingerprint"]


def test_skip_is_journalled_as_batches(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "skip", "the-run", "--steps", "4-6,9", "--why", "a spike"]) == 0
    assert "batches 4-6, 9 are skipped from its next attempt on" in capsys.readouterr().err
    (event,) = _amendments(run)
    assert (event["key"], event["value"], event["why"]) == ("data.skip_steps", ["4-6", 9], "a spike")
    assert event["by"]
    assert event["writer"] == "operator"
    assert main(["data", "skip", "the-run", "--steps", "4"]) == 0
    assert _amendments(run)[1]["value"] == [7], "step 4 has got batch 7 now"
    assert main(["data", "skip", "the-run", "--steps", "four"]) == 10
    errors = capsys.readouterr().err
    assert "--steps='four': must be a number" in errors
    assert "hint: such as --steps=120-125" in errors
    assert main(["data", "skip", "the-run", "--steps", "1000-900000"]) == 0, "it fits into a line of the journal"
    assert _amendments(run)[2]["value"] == ["1005-900005"]


def test_skip_of_a_step_that_is_in_the_newest_checkpoint_is_refused(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.checkpoint(20)
    files.write_json(folder / "ranks.json", {"loader": [[25, 0, 0, 0]]})
    write_manifest(folder, step=20, tokens=1, world={"world_size": 1})
    assert main(["data", "skip", "the-run", "--steps", "18-22"]) == 10
    assert "--steps=18: is already trained; the newest checkpoint is of step 20" in capsys.readouterr().err
    assert _amendments(run) == []
    assert main(["data", "skip", "the-run", "--steps", "21"]) == 0
    assert _amendments(run)[0]["value"] == [26], "25 batches were drawn for 20 steps"
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("step", step=20, tokens=1, batch=27)
    assert main(["data", "skip", "the-run", "--steps", "21"]) == 0
    assert _amendments(run)[1]["value"] == [28], "the journal counts where it has the number"


def test_accept_names_the_corpus_as_it_is_now(run: RunPaths, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "accept", "the-run"]) == 0
    assert "the corpus has not changed" in capsys.readouterr().err
    config = conf.load.load(run.config)
    before, text = files.read_json(run.dataset)["fingerprint"], corpus.read_text()
    corpus.write_text(text + json.dumps({"text": "one more"}) + "\n")
    try:
        assert main(["data", "accept", "the-run"]) == 11
        assert "`hlatctl resume the-run` prepares the corpus" in capsys.readouterr().err
        _prepare(run)
        assert main(["data", "accept", "the-run", "--why", "more text"]) == 0
        (event,) = _amendments(run)
        new = files.read_json(cache_root(config) / "data" / data_fingerprint(config) / "dataset.json")["fingerprint"]
        assert (event["key"], event["value"]) == ("data.fingerprint", new)
        assert new != before
    finally:
        corpus.write_text(text)


@pytest.mark.parametrize(
    "argv", [["skip", "played", "--steps", "30"], ["at", "played", "--step", "3"], ["accept", "played"]]
)
def test_a_simulated_run_has_no_data_to_look_into(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path))
    config = Config(runs_dir=os.fspath(tmp_path), cluster=ClusterConfig(launcher="simulated"))
    run = RunPaths(tmp_path / "played")
    files.write_text(run.config, conf.load.dump(config))
    (run.checkpoint(20) / "simulated.json").parent.mkdir(parents=True)
    (run.checkpoint(20) / "simulated.json").write_text("{}")
    write_manifest(run.checkpoint(20), step=20, tokens=1, world={})
    assert main(["data", *argv]) == 11
    assert capsys.readouterr().err == (
        "error: run played: is simulated, so it has no corpus\n"
        "hint: choose a run that is not simulated; `hlatctl runs` marks simulated ones\n"
    )


def test_a_corpus_is_inspected_for_a_cluster_that_can_only_be_simulated(
    run: RunPaths, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = tmp_path / ".cache" / "simulated" / "data"
    overrides = [f"data.path={corpus}", "data.on_corrupt=skip", *_KEYS, "cluster=simulated", "--json"]
    assert main(["data", "inspect", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["sources"][0]["rows"] == 120
    assert not pretended.exists()


def test_a_checkpoint_without_loader_state_is_named(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.checkpoint(20)
    folder.mkdir(parents=True)
    (folder / "ranks.json").write_text("{}")
    write_manifest(folder, step=20, tokens=1, world={})
    assert main(["data", "skip", "the-run", "--steps", "30"]) == 25
    assert f"error: {folder / 'ranks.json'}: can't be used ('loader' is missing)" in capsys.readouterr().err
