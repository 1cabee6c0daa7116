"""What holds for the whole suite: what tests compose is what Hydra composes, and what takes longest is begun first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from conf.compose import CONF_DIR
from tests import compositions
from tests.conftest import FIRST


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.tokens=5", "experiment=quickstart", "train.tokens=6", "optimizer.lr=1e-4"],
        ["model={hidden_size: 64}", "model.hidden_size=32"],
        ["~eval.groups", "++eval.items.piqa=5", "eval=hlat"],
        ["data.path='a b'", "cluster=slurm_trn1", "+backend.env.A_B=1"],
        ["train.tokens=1,2"],
        ["train.tokenz=1"],
        ["train.tokens=[1", "model=nosuch"],
        ["model=nosuch"],
        ["~eval.nosuch"],
    ],
)
def test_options_that_are_composed_once_give_what_hydra_composes(overrides: list[str]) -> None:
    def outcome(compose: object) -> object:
        try:
            return OmegaConf.to_container(compose("config", overrides=overrides))  # type: ignore[operator]
        except Exception as error:
            return type(error), str(error)

    with initialize_config_dir(config_dir=os.fspath(CONF_DIR), version_base="1.3"):
        expected = outcome(compositions.compose_with_hydra)
        assert [outcome(compositions.compose) for _ in range(2)] == [expected] * 2


def test_the_files_that_are_begun_first_are_there() -> None:
    assert [name for name in FIRST if not (Path(__file__).parent / name).exists()] == []
