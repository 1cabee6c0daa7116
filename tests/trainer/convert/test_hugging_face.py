"""Parity with transformers' LLaMA in both directions, and refused config.json files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import ModelConfig
from hlatctl.run.errors import CheckpointError
from trainer.convert import hugging_face
from trainer.convert.hugging_face import from_hugging_face, hugging_face_config, model_config, to_hugging_face
from trainer.model.decoder import Llama
from trainer.model.initial import build

SHAPES = {
    "all heads their own keys": {"num_heads": 4, "num_kv_heads": 4},
    "grouped queries": {"num_heads": 6, "num_kv_heads": 2},
    "one key head": {"num_heads": 4, "num_kv_heads": 1},
    "tied": {"num_heads": 4, "num_kv_heads": 2, "tie_embeddings": True},
    # 64 tokens at this theta have frequencies below, between and above both factors.
    "scaled rotation": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "rope_theta": 100.0,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 4.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 3.0,
        "rope_original_seq_len": 32,
    },
    # At this theta, first, middle and last frequencies of heads of 12 are kept, interpolated and divided.
    "yarn": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "rope_theta": 100.0,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 4.0,
        "rope_beta_slow": 1.0,
        "rope_beta_fast": 3.0,
        "rope_original_seq_len": 32,
    },
    "heads of another width": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "qwen3": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 20, "qk_norm": "head", "rms_norm_eps": 1e-6},
    "qwen3, tied": {"num_heads": 4, "num_kv_heads": 4, "qk_norm": "head", "tie_embeddings": True},
    "olmo2": {"num_heads": 4, "num_kv_heads": 4, "qk_norm": "all", "norm_position": "post"},
    "olmo2, grouped queries": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": "all", "norm_position": "post"},
    "other theta and eps": {"num_heads": 4, "num_kv_heads": 2, "rope_theta": 5e5, "rms_norm_eps": 1e-6},
}


def shape(**keys: Any) -> ModelConfig:
    return ModelConfig(vocab_size=131, hidden_size=48, intermediate_size=80, num_layers=3, **keys)


def random_tokens(vocab_size: int, seq: int = 64) -> Tensor:
    return torch.randint(vocab_size, (2, seq), generator=torch.Generator().manual_seed(0))


def our_logits(model: Llama, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(model(tokens), model.output_weight)


def their_model(config: ModelConfig, weights: dict[str, Tensor] | None = None) -> Any:
    """Return a model of transformers with the given weights, or random ones with norms other than 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    described = hugging_face_config(config, seq_len=64, bos_id=1, eos_id=2, dtype="float32")
    torch.manual_seed(0)
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))  # type: ignore[no-untyped-call]
    assert type(theirs).__name__ == described["architectures"][0]
    if weights is None:
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return theirs
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if config.tie_embeddings else [], [])
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("keys", SHAPES.values(), ids=list(SHAPES))
def test_our_random_weights_give_the_same_logits_in_transformers(keys: dict[str, Any]) -> None:
    config = shape(initializer_range=0.1, **keys)
    ours = build(config, seq_len=64, seed=3)
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    theirs = their_model(config, to_hugging_face(weights, config))
    tokens = random_tokens(config.vocab_size)
    expected = our_logits(ours, tokens)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.3


@pytest.mark.parametrize("keys", SHAPES.values(), ids=list(SHAPES))
def test_their_random_weights_give_the_same_logits_in_our_model(keys: dict[str, Any]) -> None:
    config = shape(**keys)
    theirs = their_model(config)
    ours = Llama(config, 64)
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config))
    tokens = random_tokens(config.vocab_size)
    with torch.no_grad():
        torch.testing.assert_close(our_logits(ours, tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("keys", SHAPES.values(), ids=list(SHAPES))
def test_weights_survive_the_round_trip_bit_for_bit(keys: dict[str, Any]) -> None:
    config = shape(**keys)
    weights = {name: p.detach() for name, p in build(config, seq_len=8, seed=1).named_parameters()}
    back = from_hugging_face(to_hugging_face(weights, config), config)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_swapped_heads_fail_the_parity_tests() -> None:
    """Two swapped heads change the logits by far more than the tolerance above."""
    config = shape(num_heads=4, num_kv_heads=2)
    theirs = their_model(config)
    weights = theirs.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].view(4, 12, -1)[[1, 0, 2, 3]].flatten(0, 1)
    ours = Llama(config, 64)
    ours.load_state_dict(from_hugging_face(weights, config))
    tokens = random_tokens(config.vocab_size)
    with torch.no_grad():
        assert (our_logits(ours, tokens) - theirs(tokens).logits).abs().max() > 1e-3


def test_pretrained_stories_model_gives_the_same_logits(real_data: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real_data / "weights" / "stories260K"
    config = model_config(json.loads((folder / "config.json").read_text()), folder / "config.json")
    assert (config.num_heads, config.num_kv_heads, config.tie_embeddings) == (8, 4, True)
    ours = Llama(config, 512)
    ours.load_state_dict(from_hugging_face(load_file(folder / "model.safetensors"), config))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog."
    for tokens in (
        torch.tensor([AutoTokenizer.from_pretrained(folder)(text)["input_ids"]]),
        random_tokens(512, seq=512),
    ):
        logits = our_logits(ours, tokens)
        with torch.no_grad():
            torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=0)
        if len(tokens) == 1:
            loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()
            assert loss < math.log(512) / 3


def described(**changes: Any) -> dict[str, Any]:
    config = hugging_face_config(shape(num_heads=4, num_kv_heads=2), seq_len=64, bos_id=1, eos_id=2, dtype="float32")
    return config | changes


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
_SCALED = {
    "rope_theta": 5e5,
    "rope_scaling": "llama3",
    "rope_scaling_factor": 32.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_seq_len": 4096,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
_YARNED = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 8.0,
    "rope_beta_slow": 1.0,
    "rope_beta_fast": 32.0,
    "rope_original_seq_len": 8192,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": 20_000}, {"rope_theta": 20_000.0}),
        ({"rope_theta": 5e5, "rope_scaling": _LLAMA3}, _SCALED),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **_LLAMA3}}, _SCALED),
        (
            {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": None}, "rope_theta": 5e5},
            _SCALED | {"rope_original_seq_len": 64},
        ),
        ({"rope_scaling": _YARN, "rope_theta": 5e5}, _YARNED),
        ({"rope_parameters": _YARN | {"beta_fast": None, "attention_factor": 1.2079441541679836}}, _YARNED),
        ({"rope_scaling": _YARN | {"beta_slow": 2, "mscale": 1.0}}, _YARNED | {"rope_beta_slow": 2.0}),
        ({"rope_scaling": None, "head_dim": None}, {}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4, "rope_theta": 1e4}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"head_dim": 12}, {"head_dim": None}),
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"model_type": "qwen3", "head_dim": None}, {"head_dim": 128, "qk_norm": "head", "norm_position": "pre"}),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3, "sliding_window": 4096}, {"qk_norm": "head"}),
        ({"model_type": "olmo2"}, {"qk_norm": "all", "norm_position": "post", "head_dim": None}),
    ],
)
def test_both_spellings_of_a_config_are_read(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    read = model_config(described(**changes), Path("folder/config.json"))
    base = {"name": "folder", "vocab_size": 131, "hidden_size": 48, "num_kv_heads": 2}
    assert {key: getattr(read, key) for key in base | expected} == base | expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, r"f/config\.json: model_type='gpt2': not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu': not supported"),
        ({"attention_bias": True, "mlp_bias": True}, r"attention_bias=True; mlp_bias=True: not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_type='linear': not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope_scaling lacks factor, low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0}}, r"must have low_freq_factor < high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling lacks factor"),
        ({"rope_scaling": {**_YARN, "factor": 0}}, r"factor=0.*: must be at least 1"),
        ({"rope_scaling": {**_YARN, "factor": "8"}}, r"factor='8': must be a number"),
        ({"rope_scaling": {**_YARN, "beta_fast": 1}}, r"must have beta_slow < beta_fast"),
        ({"rope_scaling": _YARN, "rope_theta": 1.0}, r"rope_theta=1\.0 \(must be greater than 1\)"),
        ({"rope_scaling": {**_YARN, "attention_factor": 1.0}}, r"'attention_factor': 1\.0}: not supported"),
        ({"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}, r"'mscale_all_dim': 0\.7.*not supported"),
        ({"rope_scaling": {**_YARN, "truncate": False}}, r"rope_scaling\.truncate=False: not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5: not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config={'bits': 4}: not supported"),
        ({"head_dim": 15}, r"head_dim=15 \(must be even\)"),
        ({"num_attention_heads": 5, "head_dim": None}, r"num_attention_heads=5 \(must divide hidden_size=48\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types=\['full_attention', 'sliding_att"),
        ({"use_sliding_window": True}, r"use_sliding_window=True: not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"rope_parameters\.full_attention={"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3 \(must divide num_attention_heads=4\)"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0: must be greater than 0"),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        model_config(described(**changes), Path("f/config.json"))
    assert caught.value.hint


def test_missing_keys_and_wrong_types_are_named() -> None:
    lacking = {key: value for key, value in described().items() if key not in ("vocab_size", "num_hidden_layers")}
    with pytest.raises(CheckpointError, match=r"f/config\.json: lacks vocab_size, num_hidden_layers"):
        model_config(lacking, Path("f/config.json"))
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size='48': must be a whole number"):
        model_config(described(hidden_size="48"), Path("f/config.json"))


def test_the_keys_of_a_config_json_are_printed_for_an_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shape(num_heads=4, num_kv_heads=2, qk_norm="head", rms_norm_eps=1e-6)
    (tmp_path / "config.json").write_text(
        json.dumps(hugging_face_config(model, seq_len=64, bos_id=1, eos_id=2, dtype="float32"))
    )
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "config.json")])
    assert hugging_face.main() == 0
    keys = json.loads(capsys.readouterr().out)
    assert {name: keys[name] for name in ("hidden_size", "qk_norm", "num_kv_heads")} == {
        "hidden_size": 48,
        "qk_norm": "head",
        "num_kv_heads": 2,
    }
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "nowhere.json")])
    with pytest.raises(CheckpointError, match=r"nowhere\.json: can't be read"):
        hugging_face.main()
