"""Results files of others: whatever they hold, they are read or refused with an error that a person can act on."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hlatctl.report.exchange import exported, lighteval, lm_eval, olmes, source
from hlatctl.report.exchange.imported import Figures, clean_name, pairs, whole
from hlatctl.run.errors import ConfigError, DataError, HlatctlError
from hlatctl.run.fold import read_state
from tests.hlatctl.exported_runs import TOKENS, exported_run

_MUTATIONS = 100
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 1e300, 10**19, 1.5, "", "\x00", "x" * 500, "-" * 400 + "a", "\ud800", "|", "a|b|c|d", "../"),
    *([], {}, [1], {"a": 1}, [[[]]]),
)
_ODD_NAMES = ("\x00", "-" * 300 + "b", "\ud800", "a/b", "x" * 130, "acc_stderr", "all", "")


def places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each value inside a value."""
    if parent is not None:
        yield parent, key
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in list(inside):
        yield from places(each, value, name)


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    run = exported_run(tmp_path / "runs")
    found = exported.read(run, read_state(run).milestones[TOKENS])
    forms = [json.loads(json.dumps(form.write(found))) for form in (lm_eval, lighteval, olmes)]
    chance, path = random.Random(1), tmp_path / "results_2025-01-01T00.json"
    hints: list[str] = []
    for _ in range(_MUTATIONS):
        value = copy.deepcopy(chance.choice(forms))
        for _ in range(3):
            parent, key = chance.choice(list(places(value)))
            if chance.random() < 0.3 and isinstance(parent, dict):
                parent[chance.choice(_ODD_NAMES)] = parent.pop(key)
            else:
                parent[key] = copy.deepcopy(chance.choice(_ODD))
        path.write_text(json.dumps(value))
        try:
            read = source.read(path)
        except HlatctlError as error:
            hints.append(error.hint)
        else:
            assert all(name.isascii() and name.replace("_", "").isalnum() for name in read.figures.figures)
            json.dumps(read.provenance).encode()
    assert all(hints)
    assert 0 < len(hints) < _MUTATIONS


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_BYTES", 1 << 10)
    (tmp_path / "results.json").write_text("{}" + " " * 2_000)
    with pytest.raises(ConfigError, match=r"has 2,002 bytes, the limit is 1,024; must be a file of at most 1 KiB"):
        source.read(tmp_path / "results.json")


def test_special_files_are_refused_without_being_read(tmp_path: Path) -> None:
    for name, make in (
        ("fifo", os.mkfifo),
        ("loop", lambda path: path.symlink_to(path)),
        ("zero", lambda path: path.symlink_to("/dev/zero")),
    ):
        path = tmp_path / f"{name}.json"
        make(path)
        with pytest.raises(ConfigError, match="can't be read"):
            source.read(path)
    with pytest.raises(ConfigError, match="File name too long"):
        source.read(tmp_path / ("x" * 5_000))


def test_special_files_in_the_place_of_items_are_no_items(tmp_path: Path) -> None:
    results = tmp_path / "results_D.json"
    results.write_text('{"results": {"a": {"acc,none": 0.5}, "b": {"acc,none": 0.5}, "c": {"acc,none": 0.5}}}')
    os.mkfifo(tmp_path / "samples_a_D.jsonl")
    (tmp_path / "samples_b_D.jsonl").mkdir()
    (tmp_path / "samples_c_D.jsonl").symlink_to("/dev/zero")
    assert source.read(results, tmp_path).samples == {}


@pytest.mark.parametrize("content", [b"PAR1 no parquet", b""])
def test_damaged_details_of_lighteval_are_refused(tmp_path: Path, content: bytes) -> None:
    results = tmp_path / "results_D.json"
    results.write_text('{"config_general": {}, "results": {"a|0": {"acc": 0.5}}}')
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "details_a|0_D.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"can't be imported .*\nhint: move it away to import the scores alone"):
        source.read(results, tmp_path)


def test_the_results_are_found_deep_below_a_folder_but_not_on_a_whole_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "results" / "org" / "model"
    deep.mkdir(parents=True)
    (deep / "results_2025-01-01T00.json").write_text('{"results": {"a": {"acc,none": 0.5}}}')
    assert source.read(tmp_path).path.parent == deep
    monkeypatch.setattr(source, "_MOST_FILES", 3)
    with pytest.raises(ConfigError, match="has more than 3 files and folders\nhint: name a results"):
        source.read(tmp_path)


def test_figures_are_named_as_scores_of_a_run_are() -> None:
    found = Figures(form="lm_eval")
    metrics = {"em,strict": 0.1, "em_stderr,strict": 0.01, "em,flexible-extract": 0.2, "f1,strict": 0.3, "alias": "x"}
    found.add("gsm8k", pairs(metrics, ","), n=5)
    found.add("validation_loss", pairs({"nats": 2.0}, ","))
    names = {name: (figure.metric, figure.value, figure.stderr) for name, figure in found.figures.items()}
    assert names == {
        "gsm8k": ("em", 0.1, 0.01),
        "gsm8k_flexible_extract": ("em", 0.2, None),
        "gsm8k_f1": ("f1", 0.3, None),
    }
    assert (clean_name("arc:challenge"), clean_name("pass@10")) == ("arc_challenge", "pass_at_10")
    assert [whole(value) for value in (400.0, 3, -1, 0.5, True, None)] == [400, 3, None, None, None, None]


def test_figures_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    huge = "1" * 400
    path.write_text(f'{{"results": {{"a": {{"acc,none": 0.5, "f1,none": NaN}}, "b": {{"acc,none": {huge}}}}}}}')
    assert list(source.read(path).figures.figures) == ["a"]
