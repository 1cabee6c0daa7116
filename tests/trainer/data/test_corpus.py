"""Conversion in units: each document once with its origin, the same by any number of processes and after a kill."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from hlatctl.run.errors import DataError
from hlatctl.run.paths import partial_data
from trainer.data import corpus
from trainer.data.corpus import Split
from trainer.data.documents import sources_of
from trainer.data.prepare import prepare

MakeConfig = Callable[..., Config]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of 200 documents, which is several units."""
    monkeypatch.setattr("trainer.data.corpus.UNIT_BYTES", 2000)
    path = tmp_path / "large.jsonl"
    lines = [json.dumps({"text": f"document {i}" + " and more" * (i % 9)}) + "\n" for i in range(200)]
    path.write_text("\n" + "".join(lines[:100]) + "\n" + "".join(lines[100:]))
    return path


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})


@pytest.fixture
def config(make_config: MakeConfig, path: Path) -> Config:
    return make_config(data={"path": os.fspath(path), "validation_fraction": 0.1})


def _dataset(target: Path) -> dict[str, Any]:
    dataset: dict[str, Any] = json.loads((target / "dataset.json").read_text())
    return dataset


@pytest.mark.usefixtures("one_core")
def test_every_document_of_a_file_in_ranges_is_there_once_with_its_line(
    config: Config, path: Path, tmp_path: Path
) -> None:
    prepare(config, tmp_path / "d")
    dataset = _dataset(tmp_path / "d")
    (source,) = sources_of(dataset)
    assert len(dataset["files"]) == 6
    held_out = [json.loads(line)["text"] for line in Path(dataset["validation"]["path"]).read_text().splitlines()]
    lines = path.read_text().splitlines()
    assert sorted([*source.documents, *held_out]) == sorted(json.loads(line)["text"] for line in lines if line)
    assert 5 < len(held_out) < 40
    for position, text in enumerate(source.documents):
        origin = source.origin(position)
        assert (origin.file, json.loads(lines[origin.row - 1])["text"]) == (os.fspath(path), text)
    left = {p.name for p in (tmp_path / "d").iterdir()}
    assert not [name for name in left if name.startswith((".", "unit", "held-out"))]


@pytest.mark.usefixtures("one_core")
def test_bad_line_of_a_range_is_named_with_its_number_in_the_file(config: Config, path: Path, tmp_path: Path) -> None:
    path.write_text(path.read_text().replace('{"text": "document 150', '{"body": "document 150'))
    with pytest.raises(DataError, match=r"large\.jsonl:153: data\.text_column='text' is not there"):
        prepare(config, tmp_path / "d")
    assert not partial_data(tmp_path / "d").exists(), "an error of the corpus leaves nothing"


@pytest.mark.processes
def test_result_is_the_same_with_any_number_of_processes(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    prepare(config, tmp_path / "two")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    prepare(config, tmp_path / "one")
    assert _dataset(tmp_path / "one")["fingerprint"] == _dataset(tmp_path / "two")["fingerprint"]


@pytest.mark.usefixtures("one_core")
def test_units_that_a_killed_process_finished_are_kept(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config, tmp_path / "whole")
    done: list[int] = []

    def split(folder: Path, fraction: float, unit: int) -> Split:
        if unit == 3 and not done.count(3):
            done.append(3)
            raise KeyboardInterrupt
        done.append(unit)
        return Split(folder, fraction, unit)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.data.corpus.Split", split)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "d")
    assert partial_data(tmp_path / "d").is_dir()
    with monkeypatch.context() as patch:
        patch.setattr("trainer.data.dataset.check_vocabulary", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "d")
    prepare(config, tmp_path / "d")
    assert done == [0, 1, 2, 3, 3, 4, 5, 6]
    assert _dataset(tmp_path / "d")["fingerprint"] == _dataset(tmp_path / "whole")["fingerprint"]
    assert not partial_data(tmp_path / "d").exists()


@pytest.mark.usefixtures("one_core")
def test_another_process_that_prepares_the_same_is_waited_for(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config, tmp_path / "made")
    check = corpus.check

    def other_finishes(config: Config) -> Any:
        corpora = check(config)
        (tmp_path / "made").rename(tmp_path / "d")
        return corpora

    monkeypatch.setattr(corpus, "check", other_finishes)
    before = _dataset(tmp_path / "made")
    prepare(config, tmp_path / "d")
    assert _dataset(tmp_path / "d") == before
    assert not partial_data(tmp_path / "d").exists()


def test_small_corpus_holds_out_the_documents_that_it_always_did(make_config: MakeConfig, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)]
    (tmp_path / "small.jsonl").write_text("".join(lines))
    config = make_config(data={"path": os.fspath(tmp_path / "small.jsonl"), "validation_fraction": 0.1})
    prepare(config, tmp_path / "d")
    held_out = (tmp_path / "d" / "validation.jsonl").read_text().splitlines()
    assert [int(json.loads(line)["text"].split()[1]) for line in held_out] == [9, 39, 49, 51, 55]


@pytest.mark.usefixtures("one_core")
def test_progress_has_rates_and_the_time_left(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.data.workers._SHOW_EVERY_S", 0.0)
    prepare(config, tmp_path / "d")
    lines = capsys.readouterr().err.splitlines()
    form = r"data: ([\d,]+) documents, \d+ of \d+ MB, [\d,]+ documents/s, [\d.,]+ MB/s, \d+ s left"
    shown = [int(match[1]) for line in lines if (match := re.fullmatch(form, line))]
    assert shown == sorted(shown)
    assert shown[-1] == 200
