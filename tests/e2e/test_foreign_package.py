"""A package outside this project that adds a launcher and an optimizer, used by `hlatctl train`."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Cli, WithPackage
from tests.foreign import install

pytestmark = pytest.mark.processes

_ROWS = """
from conf.registries import LauncherKind, OptimizerKind

TRAY = LauncherKind(code="acme.tray:Tray.of", jobs_run="here")
LION = OptimizerKind(code="acme.lion:Lion.of", moments=1, matrix_moments=1)
JAM = LauncherKind(code="acme.tray:jam", jobs_run="here")
"""
_TRAY = """
from flows.launch.local import LocalLauncher

class Tray(LocalLauncher):
    name = "tray"

def jam(config):
    raise ValueError("no tray is free")
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
"""
_ENTRY_POINTS = {
    "hlatctl.launchers": {"tray": "acme.rows:TRAY", "jam": "acme.rows:JAM"},
    "hlatctl.optimizers": {"lion": "acme.rows:LION", "typo": "acme.rows:LYON"},
}


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


@pytest.mark.parametrize(
    ("value", "entry_point", "error"),
    [
        (
            "optimizer.name=typo",
            "typo = acme.rows:LYON of hlatctl.optimizers",
            "AttributeError: module 'acme.rows' has no attribute 'LYON'",
        ),
        ("cluster.launcher=jam", "jam = acme.rows:JAM of hlatctl.launchers", "ValueError: no tray is free"),
    ],
)
def test_an_error_in_the_package_is_shown_with_its_name(acme: Cli, value: str, entry_point: str, error: str) -> None:
    refused = acme.train("refused", value)
    assert refused.returncode == 17, refused.stderr
    adds = f"error: {value}: package acme-training 1.0 adds it (entry point {entry_point}), and failed: {error}\nhint: "
    assert adds in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not acme.paths("refused").root.exists()


def test_names_of_the_package_are_listed(acme: Cli) -> None:
    unknown = acme.run("train", *acme.overrides, "optimizer.name=loin")
    assert unknown.returncode == 10
    assert "use one of: adamw, muon, lion, typo" in unknown.stderr
    assert "adamw, muon, lion or typo" in acme.run("config", "keys", "optimizer.name").stdout
