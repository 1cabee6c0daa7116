"""The origin of each value is the file that set it last."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from conf.compose import CONF_DIR, compose, composed_files
from conf.folders import using
from conf.load import dotted_keys, flatten, parse_yaml
from conf.origins import COMMAND_LINE, origins
from conf.schema import Config

OWN = "# @package _global_\ndefaults:\n  - /experiment/quickstart\n  - override /optimizer: hlat_7b\nseed: 7\n"


def test_each_kind_of_origin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HLATCTL_RUNS_DIR", raising=False)
    mine, project = tmp_path / "experiment" / "mine.yaml", tmp_path / "hlatctl.yaml"
    mine.parent.mkdir()
    mine.write_text(OWN)
    project.write_text("overrides: [tracking=none, optimizer.beta1=0.8]\n")
    typed = ["experiment=mine", "cluster=simulated", "train.tokens=1M"]
    with using([tmp_path]):
        found = origins(typed, compose(typed))
    expected = {
        "seed": str(mine),
        "optimizer.beta1": str(project),
        "optimizer.beta2": "conf/optimizer/adamw.yaml",  # one of hlat_7b's defaults
        "cluster.launcher": "conf/cluster/simulated.yaml",
        "train.seq_len": "conf/experiment/quickstart.yaml",
        "train.tokens": COMMAND_LINE,
    }
    assert {key: found.keys[key] for key in expected} == expected
    assert "runs_mode" not in found.keys
    assert found.files == {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (mine, project)}


@pytest.mark.parametrize("experiment", ["quickstart", "hlat_7b", "hlat_70b", "drill"])
def test_origins_agree_with_the_values_of_the_files(experiment: str) -> None:
    typed = [f"experiment={experiment}"]
    config = compose(typed)
    found, values, defaults = origins(typed, config), flatten(config), flatten(Config())
    contents = {
        f"conf/{path.relative_to(CONF_DIR)}": dotted_keys({package: parse_yaml(path.read_text())} if package else {})
        or dotted_keys(parse_yaml(path.read_text()))
        for path, package in composed_files(typed)
    }
    for key, value in values.items():
        origin = found.keys.get(key)
        if origin is None:
            assert isinstance(value, str) or value == defaults.get(key, value), key  # a path is made absolute
        elif key in contents.get(origin, {}) and not isinstance(contents[origin][key], str):
            assert contents[origin][key] == value, (key, origin)
