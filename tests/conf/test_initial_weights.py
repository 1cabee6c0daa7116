"""Which initial weights may begin a run; no tensor is read, so plain files replace them."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.fingerprint import config_fingerprint, graph_fingerprint
from conf.initial_weights import MODEL, check_initial_weights, model_overrides
from conf.schema import Config, ModelConfig
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import CheckpointError, ConfigError


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder as an import makes it, of the default model."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "shard.safetensors").write_bytes(b"weights")
    files.write_json(folder / MODEL, asdict(ModelConfig(name="elsewhere", initializer_range=0.5)))
    write_manifest(folder, step=0, tokens=0, world={})
    return folder


def beginning_with(folder: Path, **model: object) -> Config:
    config = Config(model=replace(ModelConfig(), **model))  # type: ignore[arg-type]
    return replace(config, train=replace(config.train, init_from=os.fspath(folder)))


def test_weights_of_the_same_shape_pass_whatever_they_are_called(weights: Path) -> None:
    check_initial_weights(Config())
    check_initial_weights(beginning_with(weights))


def test_every_differing_key_is_named_with_both_values_and_what_mends_it(weights: Path) -> None:
    config = beginning_with(weights, num_layers=6, tie_embeddings=True)
    with pytest.raises(ConfigError) as caught:
        check_initial_weights(config)
    assert caught.value.message == (
        f"train.init_from={weights}: its weights belong to a different model: model.num_layers=6 (the weights: 4), "
        "model.tie_embeddings=True (the weights: False)"
    )
    assert caught.value.hint == "model.num_layers=4 model.tie_embeddings=false"


def test_missing_folder_and_damaged_files_are_named(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.init_from=.*nowhere: no such folder"):
        check_initial_weights(beginning_with(tmp_path / "nowhere"))
    (weights / "shard.safetensors").write_bytes(b"less")
    with pytest.raises(CheckpointError, match=r"shard\.safetensors: 4 bytes, expected 7"):
        check_initial_weights(beginning_with(weights))
    (weights / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        check_initial_weights(beginning_with(weights))


def test_a_checkpoint_of_another_engine_is_refused_with_the_commands_that_convert_it(weights: Path) -> None:
    (weights / ".metadata").write_bytes(b"index")
    (weights / "manifest.json").unlink()
    write_manifest(weights, step=0, tokens=0, world={})
    with pytest.raises(ConfigError, match=r"its format is dcp; backend\.name=torch_native reads native") as caught:
        check_initial_weights(beginning_with(weights))
    assert "`hlatctl fork RUN backend=torch_native`" in (caught.value.hint or "")


def test_checkpoint_that_does_not_say_its_model_is_refused(weights: Path) -> None:
    for name in (MODEL, "manifest.json"):
        (weights / name).unlink()
    write_manifest(weights, step=0, tokens=0, world={})
    with pytest.raises(CheckpointError, match=r"no readable model\.json"):
        check_initial_weights(beginning_with(weights))


def test_the_overrides_of_a_model_compose_to_it() -> None:
    model = replace(ModelConfig(), num_layers=3, rms_norm_eps=1e-6, rope_theta=5e5, tie_embeddings=True)
    composed = compose(model_overrides(asdict(model))).model
    assert replace(composed, name=model.name, initializer_range=model.initializer_range) == model


def test_a_relative_folder_is_made_absolute_and_changes_no_graph(tmp_path: Path) -> None:
    config = compose(["train.init_from=weights"])
    assert config.train.init_from == os.fspath(Path("weights").absolute())
    plain = compose([])
    assert config_fingerprint(config) != config_fingerprint(plain)
    assert graph_fingerprint(config, {}) == graph_fingerprint(plain, {})
