"""The data stage: skipped damage is reported, and a changed corpus is refused until it is accepted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import conf.load
from conf.schema import Config, DataConfig, EvalConfig, ModelConfig, TokenizerConfig
from flows.runtime.context import FlowContext, open_context
from flows.stages import data
from flows.stages.data import prepare_data
from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths

pytestmark = pytest.mark.processes


def _write(corpus: Path, documents: int) -> None:
    lines = [json.dumps({"text": f"document {i} of some words"}) for i in range(documents)]
    corpus.write_text("\n".join(["{torn", *lines]) + "\n")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    _write(path, 50)
    return path


@pytest.fixture
def ctx(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlowContext]:
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
    run = RunPaths(tmp_path / "runs" / "run")
    config = Config(
        runs_dir=os.fspath(tmp_path / "runs"),
        data=DataConfig(path=os.fspath(corpus), on_corrupt="skip"),
        model=ModelConfig(vocab_size=300),
        tokenizer=TokenizerConfig(train_vocab_size=300),
        eval=EvalConfig(enabled=False),
    )
    files.write_text(run.config, conf.load.dump(config))
    files.write_json(run.provenance, {})
    context = open_context(run)
    yield context
    context.close()


def test_line_of_progress_is_shown_when_it_changes(ctx: FlowContext, tmp_path: Path) -> None:
    shown: list[str] = []
    ctx.message_sinks.append(shown.append)
    look = data._progress_of(ctx, tmp_path / "progress")
    assert not look()
    for line in ("data: 1 of 3 MB", "data: 1 of 3 MB", "", "data: 2 of 3 MB"):
        (tmp_path / "progress").write_text(line + "\n")
        assert not look()
    assert shown == ["data: 1 of 3 MB", "data: 2 of 3 MB"]


def test_damage_is_reported_once_and_another_corpus_is_refused_until_accepted(ctx: FlowContext, corpus: Path) -> None:
    prepare_data(ctx)
    repeated, damage = ctx.refresh().warnings
    assert damage.startswith(f"data: 1 damaged rows or parts of files are skipped, the first: {corpus}:1: not a")
    numbers = re.fullmatch(
        rf"data: the run trains on {corpus} about (\d+) times: 2,502,656 tokens from a corpus of about (\d+); repeats "
        r"beyond 4 add little \(arXiv 2305.16264\)",
        repeated,
    )
    assert numbers
    assert int(numbers[1]) == round(2_502_656 / int(numbers[2])) > 100
    prepare_data(ctx)
    assert len(ctx.refresh().warnings) == 2
    before = files.read_json(ctx.run.dataset)["fingerprint"]

    _write(corpus, 51)
    with pytest.raises(
        DataError, match=rf"corpus has changed since the run started \(fingerprint (\w+), was {before}\)"
    ) as e:
        prepare_data(ctx)
    assert "hlatctl data accept" in e.value.hint
    assert files.read_json(ctx.run.dataset)["fingerprint"] == before
    new = e.value.message.split("fingerprint ")[1].split(",")[0]
    with JournalWriter(ctx.run, OPERATOR_WRITER) as operator:
        operator.append("data_changed", key="data.fingerprint", value=new, by="me", why="")
    prepare_data(ctx)
    assert files.read_json(ctx.run.dataset)["fingerprint"] == new
