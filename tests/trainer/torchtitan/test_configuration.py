"""Settings that pass through to torchtitan: checked against its own configuration, each value with one owner."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from conf.parametrization import initial_std, rate_factor
from conf.schema import BackendConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig
from hlatctl.run.errors import ConfigError

pytest.importorskip("torchtitan", reason="the extra `torchtitan` is not installed")

from trainer.torchtitan.configuration import trainer_config

#: torchtitan's imports use what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"metrics": {"log_frek": 1}}, "metrics.log_frek=1: torchtitan has no such setting", "log_freq"),
        ({"metrics": {"log_freq": "often"}}, "metrics.log_freq=often: must be int", ""),
        ({"metrics": {"log_freq": 0}}, "metrics.log_freq=0: must be at least 1", "leave it out"),
        ({"comm": {"mode": "fake"}}, "comm.mode=fake: hlatctl doesn't support it", "leave it out"),
        ({"training": {"steps": 7}}, "training.steps=7: this is set by train.max_steps", "set train.max_steps"),
        (
            {"dataloader": {"dataset": "c4"}},
            "dataloader.dataset=c4: this is set by data.inputs; with torchtitan's loaders, a run could continue only "
            "with as many processes as before, and no batch could be looked up or skipped",
            "set data.inputs",
        ),
    ],
)
def test_a_setting_that_can_not_pass_through_is_refused_with_its_owner_or_a_suggestion(
    settings: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_config(Config(backend=BackendConfig(name="torchtitan", device="cpu", torchtitan=settings)))
    assert caught.value.message.startswith(f"backend.torchtitan.{message}")
    assert hint in caught.value.hint


def test_with_mup_every_parameter_has_the_rate_the_decay_and_the_initial_size_of_the_native_engine() -> None:
    model = ModelConfig(hidden_size=256, intermediate_size=512, num_layers=2, mup_base_width=64, qk_norm="head")
    config = Config(model=model, backend=BackendConfig(name="torchtitan", device="cpu"))
    titan = trainer_config(config)
    with torch.device("meta"):
        whole = titan.model_spec.model.build()
    whole.to_empty(device="cpu")
    with torch.no_grad():
        whole.init_weights(buffer_device=None)
    native = {"tok_embeddings": "embedding", "lm_head": "head", "wo": "attention.o", "w2": "mlp.down"}
    for name, parameter in whole.named_parameters():
        group = next(group for group in titan.optimizer.param_groups if re.search(group.pattern, name))
        owner = name.split(".")[-2]
        layer = f"layers.{name.split('.')[1]}." if name.startswith("layers") else ""
        ours = name if name.endswith("norm.weight") else f"{layer}{native.get(owner, 'attention.qkv')}.weight"
        settings = group.optimizer_kwargs
        assert settings["lr"] == config.optimizer.lr * rate_factor(ours, model), name
        assert settings["lr"] * settings["weight_decay"] == pytest.approx(config.optimizer.lr * 0.1), name
        if not name.endswith("norm.weight"):
            assert float(parameter.std()) == pytest.approx(initial_std(ours, model), rel=0.05), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_login_node_without_a_gpu_can_check_products_in_fp8() -> None:
    precision, parallel = PrecisionConfig(name="fp8", fp8_scaling="tensorwise"), ParallelConfig(data_parallel="fsdp")
    backend = BackendConfig(name="torchtitan", device="cuda", compile=True)
    spec = trainer_config(Config(backend=backend, precision=precision, parallel=parallel)).model_spec
    layer = spec.model.layers[0]
    assert layer.feed_forward.w1._torchao_config.enable_fsdp_float8_all_gather
    assert not hasattr(spec.model.lm_head, "_torchao_config")
