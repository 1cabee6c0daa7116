"""A package outside this project that adds a launcher and an optimizer, used by `hlatctl train`."""

from __future__ import annotations

import json
import os

import pytest

from tests.e2e.conftest import Cli
from tests.foreign import install

pytestmark = pytest.mark.processes

_ROWS = """
from conf.registries import LauncherKind, OptimizerKind

TRAY = LauncherKind(code="acme.tray:Tray.of", jobs_run="here")
LION = OptimizerKind(code="acme.lion:Lion.of", moments=1, matrix_moments=1)
FAILS = OptimizerKind(code="acme.lion:fails")
"""
_TRAY = """
from flows.launch.local import LocalLauncher

class Tray(LocalLauncher):
    name = "tray"
"""
#: Lion (arXiv 2302.06675, algorithm 2).
_LION = """
import torch
from trainer.optim.adamw import AdamW, local

class Lion(AdamW):
    def __init__(self, shards, config, **options):
        super().__init__(shards, config, others=shards, **options)
        self._config = config
        self._lion = {kind: local(tensor) for kind, tensor in self.tensors().items()}

    def step(self, *, lr, number, divisor=None, skip=None):
        super().step(lr=lr, number=number, divisor=divisor, skip=skip)
        for name, _ in self.parameters():
            weight, average, gradient = self._lion[f"model.{name}"], self._lion[f"exp_avg.{name}"], self.gradient(name)
            update = average.lerp(gradient, 1 - self._config.beta1).sign_()
            weight.mul_(1 - lr * self._config.weight_decay).sub_(lr * update)
            average.lerp_(gradient, 1 - self._config.beta2)

def fails(shards, config, **options):
    raise ValueError("no state for these shards")
"""
_ENTRY_POINTS = {
    "hlatctl.launchers": {"tray": "acme.rows:TRAY"},
    "hlatctl.optimizers": {"lion": "acme.rows:LION", "fails": "acme.rows:FAILS", "typo": "acme.rows:LYON"},
}


class WithPackage(Cli):
    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command in an environment where the package is installed."""
    cli = WithPackage(tmp_path_factory.mktemp("acme"))
    cli.overrides += ["cluster.launcher=tray", "cluster.processes_per_node=1", "train.max_steps=8"]
    modules = {"acme/__init__.py": "", "acme/rows.py": _ROWS, "acme/tray.py": _TRAY, "acme/lion.py": _LION}
    install(cli.folder, "acme-training", modules, _ENTRY_POINTS)
    return cli


def test_a_launcher_and_an_optimizer_of_another_package_train_a_run(acme: Cli) -> None:
    result = acme.train("lion", "optimizer.name=lion", "optimizer.warmup_steps=2", "optimizer.lr=1e-3")
    assert result.returncode == 0, result.stderr
    losses = acme.losses("lion")
    assert list(losses) == list(range(1, 9))
    assert losses[8] < losses[1] - 0.1
    assert {event["handle"]["launcher"] for event in acme.events("lion", "attempt_started")} == {"tray"}
    tensors = (acme.paths("lion").checkpoint(8) / "tensors.jsonl").read_text(encoding="utf-8")
    assert "exp_avg." in tensors
    assert "exp_avg_sq." not in tensors
    record = json.loads(acme.paths("lion").provenance.read_text(encoding="utf-8"))
    assert record["packages"]["acme-training"] == "1.0"


def test_an_error_in_the_package_is_shown_with_its_name(acme: Cli) -> None:
    adds = "package acme-training 1.0 adds it (entry point {0} = acme.rows:{1} of hlatctl.optimizers), and failed:"
    refused = acme.train("typo", "optimizer.name=typo")
    assert refused.returncode == 17, refused.stderr
    attribute = "AttributeError: module 'acme.rows' has no attribute 'LYON'"
    assert f"error: optimizer.name=typo: {adds.format('typo', 'LYON')} {attribute}\nhint: repair" in refused.stderr
    assert not acme.paths("typo").root.exists()

    failed = acme.train("fails", "optimizer.name=fails")
    assert failed.returncode == 17, failed.stderr
    error = f"optimizer.name=fails: {adds.format('fails', 'FAILS')} ValueError: no state for these shards"
    assert error in failed.stderr
    assert "Traceback" not in failed.stderr


def test_names_of_the_package_are_listed_and_completed(acme: Cli) -> None:
    unknown = acme.run("train", *acme.overrides, "optimizer.name=loin")
    assert unknown.returncode == 10
    assert "use one of: adamw, muon, fails, lion, typo" in unknown.stderr
    assert "adamw, muon, fails, lion or typo" in acme.run("config", "keys", "optimizer.name").stdout
