"""A run's configuration with its amendments, also from a damaged run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

import conf.load
from conf.of_run import CONFIG_AMENDED, newest_amendment, of_run, write_amended
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run with two amendments, whose files are not written yet."""
    run = RunPaths(tmp_path / "run")
    files.write_text(run.config, files.seal_lines(conf.load.dump(Config())))
    with JournalWriter(run, OPERATOR_WRITER) as journal:
        journal.append(CONFIG_AMENDED, number=1, changes={"optimizer.lr": [3e-4, 1e-4]}, by="ana", at_step=None)
        journal.append("stop_requested", by="ana")
        journal.append(CONFIG_AMENDED, number=2, changes={"checkpoint.keep": [3, 7]}, by="ben", at_step=9)
    return run


def test_amendments_are_applied_in_order_and_config_yaml_stays(run: RunPaths) -> None:
    before = run.config.read_bytes()
    newest = of_run(run)
    assert (newest.optimizer.lr, newest.checkpoint.keep) == (1e-4, 7)
    first = of_run(run, number=1)
    assert (first.optimizer.lr, first.checkpoint.keep) == (1e-4, 3)
    assert of_run(run, number=0) == Config()
    assert write_amended(run, 0) == run.config
    assert run.config.read_bytes() == before


def test_a_missing_or_damaged_file_is_made_again_from_the_events(run: RunPaths) -> None:
    path = write_amended(run, 2)
    assert path.name == "config-2.yaml"
    assert conf.load.load(path) == of_run(run)
    path.write_text(path.read_text().replace("lr: 0.0001", "lr: 0.9"))
    assert of_run(run).optimizer.lr == 1e-4
    write_amended(run, 2)
    assert conf.load.load(path).optimizer.lr == 1e-4


def test_a_damaged_event_is_replaced_by_the_file(run: RunPaths) -> None:
    write_amended(run, 1)
    write_amended(run, 2)
    journal = run.journal / f"{OPERATOR_WRITER}.jsonl"
    journal.write_text(journal.read_text().replace('"by":"ana"', '"by":"eve"').replace('"by":"ben"', '"by":"eve"'))
    assert newest_amendment(run) == 2
    assert of_run(run).checkpoint.keep == 7


def test_an_amendment_that_is_lost_in_both_places_is_an_error(run: RunPaths) -> None:
    journal = run.journal / f"{OPERATOR_WRITER}.jsonl"
    journal.write_text(journal.read_text().replace("0.0001", "0.0002"))
    with pytest.raises(ConfigError, match=r"amendment 1 is lost, and .*config-2\.yaml is missing or damaged"):
        of_run(run)
