"""Exchange with Megatron: names and layouts that its own ``dist_checkpointing`` writes, put together here with torch.

Names, shapes and the metadata's additions were compared with checkpoints that megatron-core 0.16.1 wrote.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from conf.schema import ModelConfig
from hlatctl.run import files
from hlatctl.run.checkpoint import why_invalid
from hlatctl.run.errors import CheckpointError
from hlatctl.run.paths import RunPaths
from tests.sharded_checkpoint import STEP, TINY, write_run
from tests.trainer.convert.test_hugging_face import our_logits, random_tokens, their_model
from trainer.checkpoint.dcp import METADATA, save
from trainer.checkpoint.shards import read_tensors
from trainer.convert.export import main as export
from trainer.convert.hugging_face import hugging_face_config
from trainer.convert.import_model import import_model
from trainer.model.decoder import Llama

SHAPE = ModelConfig(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, rms_norm_eps=1e-6
)
QWEN3 = replace(SHAPE, qk_norm="head", head_dim=12, tie_embeddings=True)
SCALED = replace(
    SHAPE, rope_scaling="llama3", rope_scaling_factor=32.0, rope_original_seq_len=8192, rope_theta=500_000.0
)
PADDED_ROWS = 128


def megatron_layers(theirs: dict[str, Tensor], model: ModelConfig) -> list[dict[str, Tensor]]:
    """Return each layer's tensors by Megatron's names, put together row by row."""
    width, queries = model.head_width, model.num_heads // model.num_kv_heads
    layers = []
    for number in range(model.num_layers):
        part = {
            name.removeprefix(f"model.layers.{number}."): tensor
            for name, tensor in theirs.items()
            if name.startswith(f"model.layers.{number}.")
        }
        q, k, v = (part[f"self_attn.{each}_proj.weight"] for each in "qkv")
        rows = []
        for group in range(model.num_kv_heads):
            rows.append(q[group * queries * width : (group + 1) * queries * width])
            rows += [k[group * width : (group + 1) * width], v[group * width : (group + 1) * width]]
        layer = {
            "self_attention.linear_qkv.layer_norm_weight": part["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": torch.cat(rows),
            "self_attention.linear_proj.weight": part["self_attn.o_proj.weight"],
            "mlp.linear_fc1.layer_norm_weight": part["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]),
            "mlp.linear_fc2.weight": part["mlp.down_proj.weight"],
        }
        for each in "qk":
            if model.qk_norm == "head":
                layer[f"self_attention.{each}_layernorm.weight"] = part[f"self_attn.{each}_norm.weight"]
        layers.append(layer)
    return layers


def arguments(model: ModelConfig) -> argparse.Namespace:
    """Return what Megatron-LM stores of a run's arguments, with an object of a class that is unknown here."""
    return argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_heads,
        group_query_attention=True,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_width,
        norm_epsilon=model.rms_norm_eps,
        rotary_base=model.rope_theta,
        use_rope_scaling=model.rope_scaling == "llama3",
        rope_scaling_factor=model.rope_scaling_factor,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        qk_layernorm=model.qk_norm == "head",
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        vocab_size=model.vocab_size,
        padded_vocab_size=PADDED_ROWS,
        params_dtype=torch.float32,
        optimizer=Path("an object"),
    )


def run_config(model: ModelConfig) -> dict[str, Any]:
    """Return what Megatron-Bridge stores."""
    values = vars(arguments(model))
    renamed = {
        "layernorm_epsilon": values.pop("norm_epsilon"),
        "share_embeddings_and_output_weights": not values.pop("untie_embeddings_and_output_weights"),
        "rope_scaling": values.pop("use_rope_scaling"),
        "gated_linear_unit": values.pop("swiglu"),
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "num_moe_experts": None,
    }
    for name in ("params_dtype", "optimizer", "padded_vocab_size", "group_query_attention"):
        del values[name]
    return {"model": {**values, **renamed}, "train": {"train_iters": 10}}


def write_megatron(folder: Path, model: ModelConfig, theirs: dict[str, Tensor], style: str) -> None:
    """Write a checkpoint with padded rows, optimizer states and extra states, in one of Megatron's styles."""
    padding = torch.full((PADDED_ROWS - model.vocab_size, model.hidden_size), 9.0)
    state: dict[str, Any] = {
        "embedding.word_embeddings.weight": torch.cat([theirs["model.embed_tokens.weight"], padding]),
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not model.tie_embeddings:
        state["output_layer.weight"] = torch.cat([theirs["lm_head.weight"], padding])
    layers = megatron_layers(theirs, model)
    if style == "bridge":  # non-homogeneous layers, without fused norms
        unfused = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        }
        for number, layer in enumerate(layers):
            state |= {f"decoder.layers.{number}.{unfused.get(name, name)}": part for name, part in layer.items()}
    else:
        state |= {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    state["optimizer.state.exp_avg.embedding.word_embeddings.weight"] = torch.zeros(3)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = [Path("an object")]
    common = {"args": arguments(model), "checkpoint_version": 3.0, "iteration": 10}
    if style == "state":
        state["common_state/shard_0_1"] = [common]
    folder.mkdir(parents=True)
    save(state, folder, planner=DefaultSavePlanner(flatten_state_dict=False))
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.all_local_plans = [SavePlan([])]
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    if style == "lm":
        torch.save(common, folder / "common.pt")
    if style == "bridge":
        files.write_text(folder / "run_config.yaml", yaml.safe_dump(run_config(model)))


def our_model(target: Path) -> Llama:
    model = ModelConfig(**files.read_json(target / "model.json"))
    ours = Llama(model, 64)
    weights = {name.removeprefix("model."): part for name, part in read_tensors(target, bool).items()}
    ours.load_state_dict(weights)
    return ours


@pytest.mark.parametrize(
    ("model", "style"), [(SHAPE, "lm"), (QWEN3, "bridge"), (SCALED, "state")], ids=["llama", "qwen3", "llama3"]
)
def test_a_checkpoint_of_megatron_gives_the_same_logits(tmp_path: Path, model: ModelConfig, style: str) -> None:
    theirs = their_model(model).eval()
    write_megatron(tmp_path / "run" / "iter_0000010", model, theirs.state_dict(), style)
    (tmp_path / "run" / "iter_0000009").mkdir()
    written = import_model(tmp_path / "run", tmp_path / "ours")
    assert written["from"] == os.fspath(tmp_path / "run" / "iter_0000010")
    assert why_invalid(tmp_path / "ours", of_run=False) is None
    tokens = random_tokens(model.vocab_size)
    with torch.no_grad():
        torch.testing.assert_close(
            our_logits(our_model(tmp_path / "ours"), tokens), theirs(tokens).logits, atol=1e-5, rtol=0
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    root = tmp_path_factory.mktemp("run")
    (root / "tokenizer").mkdir()
    files.write_json(root / "tokenizer" / "tokenizer.json", {})
    return write_run(root / "runs" / "run", root / "tokenizer")


def test_an_export_for_megatron_has_its_names_and_is_imported_again(run: RunPaths, tmp_path: Path) -> None:
    target = tmp_path / "megatron"
    assert export(["--run-dir", os.fspath(run.root), "--to", os.fspath(target), "--format", "megatron"]) == 0
    assert (target / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "release"
    metadata = pickle.loads((target / "release" / METADATA).read_bytes())
    shapes = {name: tuple(each.size) for name, each in metadata.state_dict_metadata.items() if hasattr(each, "size")}
    assert shapes == {
        "embedding.word_embeddings.weight": (512, 32),
        "decoder.final_layernorm.weight": (32,),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 32),
        "decoder.layers.self_attention.linear_qkv.weight": (2, 64, 32),
        "decoder.layers.self_attention.linear_proj.weight": (2, 32, 32),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 32),
        "decoder.layers.mlp.linear_fc1.weight": (2, 128, 32),
        "decoder.layers.mlp.linear_fc2.weight": (2, 32, 64),
    }
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(target / "release" / "common.pt", weights_only=True)
    assert (common["iteration"], common["args"].num_query_groups) == (STEP, 2)
    written = import_model(target, tmp_path / "ours")
    assert written["tokenizer"] == os.fspath(tmp_path / "ours" / "tokenizer")
    exported = read_tensors(run.checkpoint(STEP), lambda name: name.startswith("model."))
    again = read_tensors(tmp_path / "ours", bool)
    assert exported.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in exported.items())
    assert {**written["model"], "name": ""} == {
        **asdict(TINY), "name": "", "initializer_range": ModelConfig().initializer_range, "head_dim": None,
    }  # fmt: skip


def test_an_export_of_a_model_that_megatron_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    model = replace(TINY, qk_norm="all", norm_position="post")
    olmo = write_run(tmp_path / "runs" / "run", tmp_path / "tokenizer", model=model)
    with pytest.raises(
        CheckpointError, match=r"model\.norm_position=post with .* \(olmo2\): only dense Llama and Qwen 3"
    ):
        export(["--run-dir", os.fspath(olmo.root), "--to", os.fspath(tmp_path / "x"), "--format", "megatron"])
    assert not (tmp_path / "x").exists()


def test_a_dcp_checkpoint_with_hugging_faces_names_is_imported_with_a_config(tmp_path: Path) -> None:
    theirs, model = their_model(SHAPE).eval(), SHAPE
    state = {"model": dict(theirs.state_dict()), "optimizer": {"state": {"model.embed_tokens.weight": torch.ones(2)}}}
    (tmp_path / "step-10").mkdir()
    save(state, tmp_path / "step-10")
    with pytest.raises(CheckpointError, match=r"step-10: doesn't describe its model") as caught:
        import_model(tmp_path, tmp_path / "ours")
    assert "--config" in caught.value.hint
    (tmp_path / "hf").mkdir()
    config = tmp_path / "hf" / "config.json"
    files.write_json(config, hugging_face_config(model, seq_len=64, bos_id=1, eos_id=2, dtype="float32"))
    files.write_json(tmp_path / "hf" / "tokenizer.json", {})
    written = import_model(tmp_path, tmp_path / "ours", described=config)
    assert written["tokenizer"] == os.fspath(tmp_path / "ours" / "tokenizer")
    tokens = random_tokens(model.vocab_size)
    with torch.no_grad():
        torch.testing.assert_close(
            our_logits(our_model(tmp_path / "ours"), tokens), theirs(tokens).logits, atol=1e-5, rtol=0
        )


class _Runs:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def rewrite(folder: Path, **values: Any) -> None:
    torch.save({"args": argparse.Namespace(**{**vars(arguments(SHAPE)), **values})}, folder / "common.pt")


def test_code_in_the_settings_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_megatron(folder, SHAPE, their_model(SHAPE).state_dict(), "lm")
    rewrite(folder, evil=_Runs(tmp_path / "proof"), nested=[_Runs(tmp_path / "proof")])
    import_model(folder, tmp_path / "ours")
    assert not (tmp_path / "proof").exists()


def damage_embedding(folder: Path, *, size: tuple[int, ...] = (), **entry: Any) -> None:
    """Change what the metadata says of the embedding: its shape, and that of its chunk, or its place in a file."""
    metadata, name = pickle.loads((folder / METADATA).read_bytes()), "embedding.word_embeddings.weight"
    stored = metadata.state_dict_metadata[name]
    if size:
        stored.size, chunk = torch.Size(size), stored.chunks[0]
        stored.chunks[0] = replace(chunk, sizes=stored.size)
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            metadata.storage_data[index] = replace(info, **entry)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def nested(levels: int) -> list[Any]:
    """Return a list that ``repr`` can't write."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: rewrite(folder, num_experts=8), r"common\.pt: num_experts=8: must be None; only dense Llama"),
    (lambda folder: rewrite(folder, normalization="LayerNorm"), r"normalization=LayerNorm: must be RMSNorm"),
    (lambda folder: rewrite(folder, swiglu=False), r"swiglu=False: must be True"),
    (lambda folder: rewrite(folder, rotary_interleaved=True), r"rotary_interleaved=True: must be False"),
    (lambda folder: rewrite(folder, hidden_size=None), r"common\.pt: lacks hidden_size"),
    (lambda folder: rewrite(folder, hidden_size="32"), r"common\.pt: hidden_size='32': must be a whole number"),
    (lambda folder: rewrite(folder, num_layers=3), r"mlp\.linear_fc2\.weight|linear_qkv\.layer_norm_weight has shape"),
    (
        lambda folder: rewrite(folder, ffn_hidden_size=64),
        r"linear_fc1\.weight has shape \(2, 96, 32\), expected \(2, 128",
    ),
    (lambda folder: rewrite(folder, num_layers=10**9), r"describes \d+ parameters|too large|has shape"),
    (lambda folder: rewrite(folder, qk_layernorm=True), r"self_attention\.q_layernorm\.weight is missing"),
    (
        lambda folder: rewrite(folder, untie_embeddings_and_output_weights=True, kv_channels=4),
        r"has shape \(2, 64, 32\)",
    ),
    (lambda folder: (folder / "common.pt").write_bytes(b"PK\x03\x04"), r"common\.pt: can't be read"),
    (lambda folder: (folder / "common.pt").unlink(), r"doesn't describe its model: it has no run_config\.yaml"),
    (lambda folder: rewrite(folder, hidden_size=10**5000), r"hidden_size='\(int\)': must be a whole number"),
    (lambda folder: rewrite(folder, rotary_base=nested(300)), r"rope_theta='\(list\)': must be a number"),
    (lambda folder: damage_embedding(folder, length=2**62), r"ends at byte \d+ of __0_0\.distcp, which is shorter"),
    (lambda folder: damage_embedding(folder, offset=2**64), r"ends at byte \d{20} of __0_0"),
    (lambda folder: damage_embedding(folder, relative_path="a\0b"), r"which is shorter"),
    (lambda folder: damage_embedding(folder, size=(2**40, 32)), r"distcp, expected at least \d+"),
    (lambda folder: damage_embedding(folder, size=(-1, 32)), r"a tensor has an impossible shape"),
    (lambda folder: os.truncate(folder / "__0_0.distcp", 2000), r"can't be read|is damaged|need at least"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "iter_0000010"
    write_megatron(folder, SHAPE, their_model(SHAPE).state_dict(), "lm")
    return folder


@pytest.mark.parametrize(("damage", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_an_unusable_checkpoint_is_refused_with_a_hint(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "iter_0000010"))
    damage(folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        import_model(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", r"linear_fc1\.weight: has experts; only dense"),
        ("decoder.layers.self_attention.linear_qkv.bias", r"linear_qkv\.bias: not in a llama; only dense"),
        ("decoder.layers.post_mlp_layernorm.weight", r"post_mlp_layernorm\.weight: not in a llama"),
    ],
)
def test_weights_of_another_architecture_are_refused(tmp_path: Path, name: str, says: str) -> None:
    folder = tmp_path / "checkpoint"
    write_megatron(folder, SHAPE, {**their_model(SHAPE).state_dict()}, "lm")
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=says):
        import_model(folder, tmp_path / "ours")


def test_a_config_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    other = hugging_face_config(replace(SHAPE, rope_theta=5e5), seq_len=64, bos_id=1, eos_id=2, dtype="float32")
    files.write_json(config, other)
    with pytest.raises(
        CheckpointError, match=r"is of a different model: rope_theta=500000\.0 \(iter_0000010: 10000\.0\)"
    ):
        import_model(checkpoint, tmp_path / "ours", described=config)
