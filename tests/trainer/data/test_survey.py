from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conf.load import dump
from conf.schema import SourceConfig
from hlatctl.run import files
from tests.trainer.conftest import MakeConfig
from trainer.data import survey as module
from trainer.data.documents import sources_of
from trainer.data.survey import survey


def test_a_whole_corpus_is_counted(make_config: MakeConfig, mixed: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    sources = [
        SourceConfig(path=source["path"], weight=weight)
        for source, weight in zip(mixed["sources"], (3.0, 1.0), strict=True)
    ]
    result = survey(make_config(data={"path": None, "sources": sources}), mixed, documents=1000)
    tokenizer = Tokenizer.from_file(str(Path(mixed["tokenizer"]["path"]) / "tokenizer.json"))
    lengths = [len(tokenizer.encode(text).ids) + 1 for text in sources_of(mixed)[0].documents]
    large, few = result["sources"]
    assert large["tokens"] == sum(lengths)
    assert result["tokens"] == large["tokens"] + few["tokens"]
    assert {int(limit): n for limit, n in large["length_histogram"].items()} == {
        limit: n
        for limit in (2**i for i in range(20))
        if (n := sum(limit // 2 <= length < limit for length in lengths))
    }
    assert (large["weight"], few["weight"], large["measured_documents"]) == (0.75, 0.25, large["documents"])
    assert result["documents"] == large["documents"] + few["documents"]
    assert result["sample"].strip()


def test_a_large_corpus_is_estimated_from_some_documents(make_config: MakeConfig, dataset: Path) -> None:
    description = json.loads(dataset.read_text())
    exact, estimated = (survey(make_config(), description, documents=n) for n in (1000, 60))
    assert estimated["sources"][0]["measured_documents"] == 60
    assert estimated["tokens"] == pytest.approx(exact["tokens"], rel=0.1)
    assert sum(estimated["sources"][0]["length_histogram"].values()) == 60


def test_module_prints_the_survey_as_json(
    make_config: MakeConfig, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write_text(tmp_path / "config.yaml", dump(make_config()))
    argv = ["--config", os.fspath(tmp_path / "config.yaml"), "--dataset", os.fspath(dataset), "--documents", "5"]
    assert module.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["corrupt_count"] == 0
