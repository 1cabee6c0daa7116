"""What several runs need is made by one of them; the others wait, and can be stopped meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from conf.fingerprint import data_fingerprint
from conf.schema import Config
from flows import control, pretrain
from flows.launchers import open_context
from flows.runtime.context import FlowContext, cache_root
from flows.runtime.jobs import run_job
from flows.runtime.shared_work import alone
from flows.stages.data import prepare_data
from hlatctl.run import files
from hlatctl.run.errors import StoppedError
from hlatctl.run.journal import read_events
from tests.flows.conftest import Recorder

WAIT_S = 60.0


class Waiter(Recorder):
    """Tells when a run waits for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def message(self, text: str) -> None:
        super().message(text)
        if "waiting for" in text:
            self.waits.set()


@contextmanager
def run(config: Config, name: str, observer: Recorder) -> Iterator[FlowContext]:
    paths = pretrain.create(config, argv=[], run_id=name)
    files.write_json(paths.provenance, {})
    with closing(open_context(paths, observer)) as ctx:
        yield ctx


@pytest.fixture
def folder(mock_config: Config) -> Path:
    return cache_root(mock_config) / "data" / data_fingerprint(mock_config)


def test_a_run_waits_for_another_that_prepares_the_same_corpus_and_uses_it(mock_config: Config, folder: Path) -> None:
    waiter = Waiter()
    with run(mock_config, "first", Recorder()) as first, run(mock_config, "second", waiter) as second:
        with alone(first, folder, "data"):
            thread = threading.Thread(target=prepare_data, args=[second])
            thread.start()
            assert waiter.waits.wait(WAIT_S)
            run_job(first, first.job("data", "-m", "trainer.data.prepare", "--to", os.fspath(folder)))
        thread.join(WAIT_S)
        assert [event["stage"] for event in read_events(second.run) if event["kind"] == "stage_finished"] == ["data"]
        assert second.run.dataset.is_file()
        assert not (second.run.launch(0) / "data.sh").exists()
    assert len([text for text in waiter.messages if "waiting for" in text]) == 1


def test_a_run_that_waits_for_another_can_be_stopped(mock_config: Config, folder: Path) -> None:
    waiter, stopped = Waiter(), threading.Event()

    def wait() -> None:
        with pytest.raises(StoppedError):
            prepare_data(second)
        stopped.set()

    with run(mock_config, "first", Recorder()) as first, run(mock_config, "second", waiter) as second:
        with alone(first, folder, "data"):
            thread = threading.Thread(target=wait)
            thread.start()
            assert waiter.waits.wait(WAIT_S)
            control.request_stop(second.run, by="test", wait_s=0)
            thread.join(WAIT_S)
        assert stopped.is_set()
