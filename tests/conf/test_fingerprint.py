"""Fingerprints change with what a stage depends on, and with nothing else."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from conf.fingerprint import config_fingerprint, data_fingerprint, graph_fingerprint
from conf.schema import Config, DataConfig, TokenizerConfig
from tests.conf.test_validate import config_with

VERSIONS = {"torch": "2.13.0"}


def corpus(folder: Path) -> Config:
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    return dataclasses.replace(Config(), data=DataConfig(path=os.fspath(folder)))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__lr": 1e-5},
        {"seed": 7},
        {"train__tokens": 10**9},
        {"checkpoint__every_steps": 7},
        {"eval__enabled": False},
        {"model__initializer_range": 0.5},
        {"model__scaled_initialization": False},
        {"model__total_parameters": 10**9, "model__flops_per_token": 10**9},
        {"experiment_name": "other"},
    ],
)
def test_what_does_not_enter_a_graph_does_not_recompile_it(changes: dict[str, object]) -> None:
    assert graph_fingerprint(config_with(**changes), VERSIONS) == graph_fingerprint(Config(), VERSIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__num_layers": 5},
        {"train__seq_len": 256},
        {"train__global_batch_size": 16},
        {"model__rope_theta": 5e5},
        {"parallel__expert_parallel_size": 2},
        {"backend__torchtitan": {"compile": {"backend": "neuron"}}},
        {"train__micro_batch_size": 4},
    ],
)
def test_what_enters_a_graph_recompiles_it(changes: dict[str, object]) -> None:
    assert graph_fingerprint(config_with(**changes), VERSIONS) != graph_fingerprint(Config(), VERSIONS)
    assert graph_fingerprint(Config(), {"torch": "2.14.0"}) != graph_fingerprint(Config(), VERSIONS)


@pytest.mark.parametrize("changes", [{"seed": 7}, {"optimizer__lr": 1e-5}, {"model__num_layers": 5}])
def test_what_does_not_enter_a_corpus_does_not_rebuild_it(changes: dict[str, object]) -> None:
    assert data_fingerprint(config_with(**changes)) == data_fingerprint(Config())


def test_a_corpus_is_rebuilt_when_a_file_of_it_changes_comes_or_goes(tmp_path: Path) -> None:
    config = corpus(tmp_path / "corpus")
    seen = {data_fingerprint(config)}
    assert data_fingerprint(config) in seen
    file = tmp_path / "corpus" / "a.jsonl"
    file.write_text('{"text": "b"}\n', encoding="utf-8")
    os.utime(file, ns=(1, 1))
    seen.add(data_fingerprint(config))
    (tmp_path / "corpus" / "b.jsonl").write_text("", encoding="utf-8")
    seen.add(data_fingerprint(config))
    (tmp_path / "corpus" / "b.jsonl").unlink()
    file.unlink()
    seen.add(data_fingerprint(config))
    assert len(seen) == 4


def test_the_vocabulary_counts_only_where_a_tokenizer_is_trained(tmp_path: Path) -> None:
    given = os.fspath(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")

    def key(path: str | None, size: int) -> str:
        return data_fingerprint(
            dataclasses.replace(Config(), tokenizer=TokenizerConfig(path=path, train_vocab_size=size))
        )

    assert key(given, 1000) == key(given, 2000)
    assert key(None, 1000) != key(None, 2000)


def test_the_whole_configuration_has_a_fingerprint() -> None:
    assert config_fingerprint(Config()) == config_fingerprint(Config())
    assert config_fingerprint(Config()) != config_fingerprint(config_with(seed=7))


@pytest.mark.parametrize("named", ["ids", "ids.idx", "ids.bin"])
@pytest.mark.parametrize("changed", ["ids.idx", "ids.bin"])
def test_data_fingerprint_covers_both_files_of_token_ids(tmp_path: Path, named: str, changed: str) -> None:
    for name in ("ids.idx", "ids.bin"):
        (tmp_path / name).write_bytes(b"1")
    config = Config(data=DataConfig(path=str(tmp_path / named)))
    before = data_fingerprint(config)
    (tmp_path / changed).write_bytes(b"22")
    assert data_fingerprint(config) != before
