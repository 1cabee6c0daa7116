"""What ``eval.check`` answers about the contracts of an external model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.load import dump
from conf.schema import Config, EvalConfig, TrainConfig
from eval import check
from hlatctl.run import contract
from hlatctl.run.contract import Contracts
from hlatctl.run.paths import RunPaths


def test_a_model_without_a_run_has_the_contracts_that_its_new_run_will_have(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "config.yaml", RunPaths(tmp_path / "run")
    wanted = EvalConfig(tasks=["smoke_crows_pairs"], limit=2)
    file.write_text(dump(Config(train=TrainConfig(seq_len=256), eval=wanted)), encoding="utf-8")
    words = ["--config", str(file), "--model", str(model_folder)]
    assert check.main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    assert list(alone["contracts"]) == ["1"]
    assert check.main([*words, "--run-dir", str(run.root)]) == 0
    assert json.loads(capsys.readouterr().out) == alone
    other = Contracts(tasks={"smoke_crows_pairs": {"shots": 5}})
    contract.admit(run, other)
    (run.eval(0) / "tasks").mkdir(parents=True)
    (run.eval(0) / "tasks" / "smoke_crows_pairs.json").touch()
    assert check.main([*words, "--run-dir", str(run.root), "--new-contract"]) == 0
    assert list(json.loads(capsys.readouterr().out)["contracts"]) == ["2"]
