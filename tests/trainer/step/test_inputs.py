"""What a process trains on, by its place among the processes of its replica."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.load import load
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeRun
from trainer import __main__, preflight
from trainer.data.loader import Batches, Loader
from trainer.step.inputs import open_batches, read_dataset

_READER, _RECEIVER, _OTHER_STAGE = 0, 1, 2


def backend(rank: int, told: Any = None) -> Any:
    """A process of one replica, of which rank 2 needs no tokens; ``told`` is what rank 0 sends."""
    return SimpleNamespace(
        rank=rank,
        data_ranks=[_READER, _RECEIVER],
        data_parallel_rank=0,
        data_parallel_size=1,
        from_rank0=lambda value: value if rank == 0 else told,
    )


@pytest.fixture
def job_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(JOB_FOLDER_ENV, folder)
        yield


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> RunPaths:
    return make_run(tmp_path / "run")


def opened(run: RunPaths, rank: int, dataset: dict[str, Any]) -> Batches:
    return open_batches(load(run.config), run, dataset, backend(rank, [[], None]), None)[0]


@pytest.mark.usefixtures("job_folder")
def test_one_process_reads_another_receives_and_a_third_needs_nothing(run: RunPaths) -> None:
    dataset = files.read_sealed_json(run.dataset)
    members = [opened(run, rank, dataset) for rank in (_READER, _RECEIVER, _OTHER_STAGE)]
    try:
        read, received, none = (member.next() for member in members)
        assert all(map(torch.equal, read, received))
        assert read[0].any()
        assert not none[0].any()
        assert none[0].shape == read[0].shape
        assert [isinstance(member, Loader) for member in members] == [True, False, False]
    finally:
        for member in members:
            member.close()


@pytest.mark.usefixtures("job_folder")
def test_a_corpus_that_can_not_be_opened_is_the_same_error_for_all(run: RunPaths) -> None:
    dataset = files.read_sealed_json(run.dataset)
    dataset["files"][0]["path"] = "/nowhere/part-00000.arrow"

    def take(rank: int) -> None:
        batches = opened(run, rank, dataset)
        try:
            batches.next()
        finally:
            batches.close()

    def error(rank: int) -> str:
        with pytest.raises(DataError, match="/nowhere/part-00000") as caught:
            take(rank)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(error, (_READER, _RECEIVER))
    assert first == second


def test_without_a_private_folder_of_the_job_each_process_reads(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_FOLDER_ENV, raising=False)
    batches = opened(run, _RECEIVER, files.read_sealed_json(run.dataset))
    assert isinstance(batches, Loader)
    batches.close()


def test_only_rank_0_reads_the_description_of_the_corpus_and_all_get_its_error(run: RunPaths) -> None:
    told: list[Any] = []
    process = backend(0)

    def tell(value: Any) -> Any:
        told.append(value)
        return value

    process.from_rank0 = tell
    expected = read_dataset(run, process)
    os.unlink(run.dataset)
    assert read_dataset(run, backend(1, told[0])) == expected
    with pytest.raises(DataError, match=r"dataset\.json: can't be read"):
        read_dataset(run, process)
    with pytest.raises(DataError, match=r"dataset\.json: can't be read") as caught:
        read_dataset(run, backend(1, told[1]))
    assert "hlatctl resume" in caught.value.hint


@pytest.mark.parametrize(("main", "more"), [(__main__.main, ["--attempt", "1"]), (preflight.main, [])])
def test_a_process_of_a_job_reads_the_configuration_on_its_own_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], int], more: list[str]
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "config.yaml").write_text("- as the first process of this node copied it\n")
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    with pytest.raises(ConfigError, match=r"run/config\.yaml: contains list"):
        main(["--run-dir", os.fspath(tmp_path / "run"), *more])
