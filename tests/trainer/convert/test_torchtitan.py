"""torchtitan's checkpoints in Hugging Face's and our own format: equal logits in transformers, and equal moments."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from conf.schema import BackendConfig, Config, ModelConfig
from conf.training_rules import learning_rate
from hlatctl.run import files
from hlatctl.run.checkpoint import INDEX_FILES, read_manifest, write_manifest
from hlatctl.run.errors import CheckpointError, DependencyError
from trainer.checkpoint.shards import read_tensors, save_whole
from trainer.convert.hugging_face import Parts, Weights
from trainer.convert.import_model import import_model
from trainer.convert.serve import described, take
from trainer.model.decoder import Llama

pytest.importorskip("torchtitan", reason="the extra `torchtitan` is not installed")
from trainer.checkpoint import dcp
from trainer.checkpoint.trust import why_incomplete
from trainer.convert import torchtitan as convert
from trainer.torchtitan.models import model_spec

#: Where torchtitan asks for FP32 on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")

_KINDS = ("llama3", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v2", "gpt_oss")


@pytest.fixture(scope="module", autouse=True)
def _families() -> None:
    """Import torchtitan's families, which takes seconds, and only in the process that runs these tests."""
    with warnings.catch_warnings():  # its imports use what torch has deprecated
        warnings.simplefilter("ignore")
        for family in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
            importlib.import_module(f"torchtitan.models.{family}")


def _spec(kind: str) -> Any:
    """A small model of a family, cut from torchtitan's own debug model."""
    family = {"qwen3_moe": "qwen3", "deepseek_v2": "deepseek_v3"}.get(kind, kind)
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    spec = registry("debugmodel_moe" if kind == "qwen3_moe" else "debugmodel")
    model = spec.model
    model.layers = model.layers[:2]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = 128
    for layer in model.layers:
        layer.attention.rope.max_seq_len = 64  # the length of its table
        if kind == "gpt_oss":
            layer.attention.sliding_window_size = layer.attention.sliding_window_size and 5
            layer.moe.routed_experts.inner_experts.swiglu_limit = 0.7
        if layer.moe is not None:
            _few_experts(layer.moe, sigmoid=kind == "deepseek_v3")
        if layer.feed_forward is not None:
            _narrow(layer.feed_forward, 96)
    return spec


def _few_experts(mixture: Any, *, sigmoid: bool) -> None:
    experts, router = mixture.routed_experts, mixture.router
    for part in (mixture, router, experts.inner_experts, experts.token_dispatcher):
        part.num_experts = 4
    router.gate.out_features, experts.inner_experts.hidden_dim = 4, 32
    router.top_k = experts.token_dispatcher.top_k = 2
    if sigmoid:
        router.score_func, router.route_norm, router.route_scale = "sigmoid", True, 2.5
    if mixture.shared_experts is not None:
        _narrow(mixture.shared_experts, 64)


def _narrow(part: Any, width: int) -> None:
    part.w1.out_features = part.w3.out_features = part.w2.in_features = width


def _model(spec: Any) -> Any:
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name or "sinks" in name else 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias_E"):
                is_exported = spec.name == "deepseek_v3" and not convert._is_deepseek_v2(spec)
                buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)) if is_exported else torch.zeros(1))
    return model


def _logits(model: Any, tokens: Tensor) -> Tensor:
    for layer in model.layers.values():
        window = 5 if getattr(layer, "attn_mask_key", "") == "sliding_window_mask" else None
        layer.attention.inner_attention.forward = partial(_attend, window=window)
    for module in model.modules():
        if hasattr(module, "w1_EFD") or hasattr(module, "mlp1_weight_EGD"):
            module.forward = partial(_experts, module)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        logits: Tensor = model(tokens, attention_masks=None, positions=positions)
    return logits


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    scale: float | None = None,
    out_transform: Callable[[Tensor, Tensor], Tensor] = lambda out, _: out,
    **_: Any,
) -> Tensor:
    """Attend as torchtitan's kernels do, which need a device: with the logarithm of each row's sum, for sinks."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    scores = scores.masked_fill((back < 0) | (back >= (window or q.shape[2])), -torch.inf)
    return out_transform((scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2))


def _experts(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute the experts in FP32, so that logits can be compared; torchtitan computes them in BF16."""
    parts = torch.split(rows, counts.tolist())
    if hasattr(experts, "w1_EFD"):
        weights = zip(parts, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, strict=True)
        return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in weights])
    from torchtitan.models.gpt_oss.moe import swiglu

    into, out = (experts.mlp1_weight_EGD, experts.mlp1_bias_EG), (experts.mlp2_weight_EDF, experts.mlp2_bias_ED)
    results = []
    for x, w1, b1, w2, b2 in zip(parts, *into, *out, strict=True):
        results.append(swiglu(x @ w1.T + b1, limit=experts.swiglu_limit) @ w2.T + b2)
    return torch.cat(results)


@pytest.fixture(scope="module", params=_KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """The description of a model, the model, and its checkpoint."""
    spec = _spec(request.param)
    model = _model(spec)
    folder = tmp_path_factory.mktemp("titan") / "step-00000007"
    dcp.save({**model.state_dict(), "optimizer": {"state.norm.weight.exp_avg": torch.ones(3)}}, folder)
    return spec, model, folder


def test_exported_weights_give_the_same_logits_in_transformers(
    trained: tuple[Any, Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    spec, model, folder = trained
    weights = convert.TitanWeights(folder, spec)
    save_file(weights.read(list(weights.ours)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    files.write_json(tmp_path / "config.json", weights.config(seq_len=1 << 20, bos_id=0, eos_id=1, dtype="float32"))
    models: Any = AutoModelForCausalLM
    theirs, loaded = models.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loaded.values())

    histogram = torch.histc  # of integers only on a GPU
    monkeypatch.setattr(torch, "histc", lambda values, **bins: histogram(values.float(), **bins).to(values.dtype))
    tokens = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(_logits(model, tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_imported_weights_are_those_that_were_exported(trained: tuple[Any, Any, Path]) -> None:
    spec, model, folder = trained
    weights = convert.TitanWeights(folder, spec)
    imported = convert.titan_weights(weights.read(list(weights.ours)), spec)
    assert imported.keys() == model.state_dict().keys()
    assert all(torch.equal(imported[name], value) for name, value in model.state_dict().items())


def test_weights_without_a_place_in_hugging_face_s_model_are_named(tmp_path: Path) -> None:
    spec = _spec("qwen3_moe")
    state = dict(_model(spec).state_dict())
    dcp.save(state, tmp_path / "zero")
    assert convert.TitanWeights(tmp_path / "zero", spec).left_out == []
    name = "layers.1.moe.expert_bias_E"
    dcp.save({**state, name: torch.ones(4)}, tmp_path / "one")
    assert convert.TitanWeights(tmp_path / "one", spec).left_out == [name]


def test_weights_are_served_one_at_a_time(trained: tuple[Any, Any, Path]) -> None:
    spec, _, folder = trained
    weights = convert.TitanWeights(folder, spec)
    expected, parts = weights.read(list(weights.ours)), Parts.of(weights)
    assert described(parts).keys() == expected.keys()
    for name in list(expected)[::5]:
        assert torch.equal(take(parts, name, [[1, 9, None]]), expected[name][1:9])


def test_weights_of_another_model_are_refused(trained: tuple[Any, Any, Path], tmp_path: Path) -> None:
    spec, model, _ = trained
    state = dict(model.state_dict())
    del state["norm.weight"]
    dcp.save(state, tmp_path / "less")
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        convert.TitanWeights(tmp_path / "less", spec)
    dcp.save({**state, "norm.weight": torch.ones(3)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \(3,\), expected \(256,\)"):
        convert.TitanWeights(tmp_path / "other", spec)


def test_weights_that_the_model_does_not_have_are_not_imported(trained: tuple[Any, Any, Path]) -> None:
    spec, _, folder = trained
    weights = convert.TitanWeights(folder, spec)
    theirs = weights.read(list(weights.ours))
    with pytest.raises(CheckpointError, match=r"model\.layers\.(\{\}|0)\.other: .* has no such weight"):
        convert.titan_weights(theirs | {"model.layers.0.other": torch.ones(2)}, spec)
    with pytest.raises(CheckpointError, match=r"norm\.weight: is missing"):
        convert.titan_weights({name: value for name, value in theirs.items() if name != "model.norm.weight"}, spec)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_model_that_was_exported_is_imported_for_torchtitan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.models.gpt_oss import gptoss_configs

    spec = _spec(kind)
    for layer in spec.model.layers:
        if kind.startswith("deepseek"):
            layer.attention.mscale = 1.0  # DeepSeek-V3's; the temperature of YaRN is no key of ours
    monkeypatch.setitem(gptoss_configs, "tiny", lambda **_: _spec("gpt_oss").model)
    model = _model(spec)
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("expert_bias_E")}
    dcp.save(model.state_dict(), tmp_path / "saved")
    weights = convert.TitanWeights(tmp_path / "saved", spec)
    source, target = tmp_path / "hf", tmp_path / "imported"
    source.mkdir()
    save_file(weights.read(list(weights.ours)), source / "model.safetensors", metadata={"format": "pt"})
    files.write_json(source / "config.json", weights.config(seq_len=64, bos_id=0, eos_id=1, dtype="float32"))
    written = import_model(source, target, "torchtitan")
    assert (written["backend"], read_manifest(target).format) == ("torchtitan", "dcp")
    assert why_incomplete(target) is None
    imported = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(imported, target)
    assert all(torch.equal(imported[name], value) for name, value in state.items())
    if kind != "gpt_oss":  # other trainers nest the model, and their checkpoints need its config.json
        dcp.save({"model": model.state_dict(), "step": 3}, tmp_path / "nested" / "step-3")
        import_model(tmp_path / "nested", tmp_path / "again", "torchtitan", source / "config.json")
        again = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(again, tmp_path / "again")
        assert all(torch.equal(again[name], value) for name, value in state.items())
    assert (written["model"]["num_experts"], bool(written["model"]["kv_lora_rank"])) == {
        "llama3": (0, False), "qwen3": (0, False), "qwen3_moe": (4, False), "deepseek_v3": (4, True),
        "deepseek_v2": (4, True), "gpt_oss": (4, False),
    }[kind]  # fmt: skip


def test_without_torchtitan_a_checkpoint_is_an_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / INDEX_FILES["dcp"]).touch()
    monkeypatch.setitem(sys.modules, "trainer.torchtitan.models", None)  # as if its import failed
    monkeypatch.setattr("conf.environment.package_versions", lambda names: {})
    with pytest.raises(DependencyError, match="the package torchtitan is not installed") as caught:
        Weights.open(tmp_path, Config(backend=BackendConfig(name="torchtitan")))
    assert "pip install --no-deps torchtitan==" in str(caught.value.hint)


_SHAPES = {
    "llama3": ModelConfig(
        vocab_size=128, hidden_size=256, intermediate_size=96, num_layers=2, num_heads=16, num_kv_heads=16,
        rope_theta=500_000.0, rope_scaling="llama3",
    ),
    "qwen3": ModelConfig(
        vocab_size=128, hidden_size=256, intermediate_size=96, num_layers=2, num_heads=16, num_kv_heads=8,
        head_dim=128, qk_norm="head", rope_theta=1_000_000.0, rms_norm_eps=1e-6, tie_embeddings=True,
    ),
}  # fmt: skip


def _native(model: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint of our own format; each moment follows from its weight, so that its order can be checked."""
    torch.manual_seed(0)
    ours = Llama(model, 64)
    with torch.no_grad():
        for name, value in ours.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.1)
    weights = {name: value.detach() for name, value in ours.named_parameters()}
    tensors = {f"model.{name}": value for name, value in weights.items()}
    tensors |= {f"exp_avg.{name}": value * 2 for name, value in weights.items()}
    tensors |= {f"exp_avg_sq.{name}": value * 3 for name, value in weights.items()}
    folder.mkdir()
    save_whole(tensors, folder)
    files.write_json(folder / "state.json", {"optimizer_steps": 6})
    write_manifest(folder, step=7, tokens=700, world={"world_size": 1})
    return tensors


@pytest.mark.parametrize("kind", _SHAPES)
def test_a_checkpoint_of_one_engine_continues_in_the_other(kind: str, tmp_path: Path) -> None:
    from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, init_optim_state

    shape = _SHAPES[kind]
    config = Config(model=shape)
    spec = model_spec(config)
    tensors = _native(shape, tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    convert.to_dcp(tmp_path / "ours", tmp_path / "theirs", config, spec)
    assert (read_manifest(tmp_path / "theirs").step, read_manifest(tmp_path / "theirs").format) == (7, "dcp")
    assert why_incomplete(tmp_path / "theirs") is None

    model = spec.model.build()
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    init_optim_state(optimizer)
    state = {
        **model.state_dict(),
        "optimizer": get_flat_optim_state_dict(optimizer),
        "lr_scheduler": {"last_epoch": 0},
        "train_state": {"step": 0, "ntokens_seen": 0},
        "dataloader": {},
    }
    dcp.load(state, tmp_path / "theirs")
    model.load_state_dict(state, strict=False)
    assert (state["train_state"], state["lr_scheduler"]) == ({"step": 7, "ntokens_seen": 700}, {"last_epoch": 6})
    for name, value in model.named_parameters():
        assert torch.equal(state["optimizer"][f"state.{name}.exp_avg"], value * 2)
        assert torch.equal(state["optimizer"][f"state.{name}.exp_avg_sq"], value * 3)
        assert float(state["optimizer"][f"state.{name}.step"]) == 6
        assert state["optimizer"][f"param_groups.{name}.lr"] == learning_rate(7, config)

    ours = Llama(shape, 64)
    ours.load_state_dict(
        {name[6:]: value for name, value in tensors.items() if name.startswith("model.")}, strict=False
    )
    tokens = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            _logits(model, tokens), F.linear(ours(tokens), ours.output_weight), atol=1e-4, rtol=0
        )

    (tmp_path / "back").mkdir()
    convert.from_dcp(tmp_path / "theirs", tmp_path / "back", config, spec)
    back = read_tensors(tmp_path / "back", bool)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in tensors.items())
    assert json.loads((tmp_path / "back" / "state.json").read_text()) == {"optimizer_steps": 6}


def test_a_checkpoint_without_adamw_s_moments_is_not_converted(tmp_path: Path) -> None:
    shape = _SHAPES["llama3"]
    config = Config(model=shape)
    tensors = _native(shape, tmp_path / "ours")
    for path in (tmp_path / "ours").iterdir():
        path.unlink()
    save_whole({name: value for name, value in tensors.items() if name != "exp_avg_sq.norm.weight"}, tmp_path / "ours")
    files.write_json(tmp_path / "ours" / "state.json", {"optimizer_steps": 6})
    write_manifest(tmp_path / "ours", step=7, tokens=700, world={})
    with pytest.raises(CheckpointError, match=r"exp_avg_sq\.norm\.weight is missing; only AdamW's moments"):
        convert.to_dcp(tmp_path / "ours", tmp_path / "theirs", config, model_spec(config))
    assert not (tmp_path / "theirs" / INDEX_FILES["dcp"]).exists()
