"""``python -m trainer.export --run-dir RUN --step N --to DIR``: a checkpoint as a Hugging Face LLaMA folder.

Only the weights are read. The coalesced layers are cut apart again; nothing else changes, so logits are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.load import load
from conf.schema import Config, ModelConfig
from hlatctl.run import files
from hlatctl.run.errors import CheckpointError, StorageError, run_main
from hlatctl.run.manifest import why_invalid
from hlatctl.run.paths import RunPaths

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "model."
_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def export(config: Config, run: RunPaths, step: int, target: Path) -> None:
    """Write the folder, whole or not at all.

    Raises:
        CheckpointError: there is no valid checkpoint of that step.
        StorageError: the folder can't be written.
    """
    from safetensors.torch import save_file

    weights = hugging_face_weights(read_weights(run, step), config.model)
    dataset = files.read_json(run.dataset)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(dataset["tokenizer"]["path"], partial)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        files.write_json(partial / "config.json", hugging_face_config(config, dataset["tokenizer"]))
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except OSError as error:
        raise StorageError(f"{target}: can't be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_weights(run: RunPaths, step: int) -> dict[str, Tensor]:
    """The weights of a checkpoint by our names; optimizer moments stay on the disk."""
    from safetensors import safe_open

    folder = run.checkpoint(step)
    reason = why_invalid(folder)
    if reason:
        raise CheckpointError(f"{folder}: {reason}", hint="export the checkpoint of another step")
    weights = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name.startswith(_PREFIX):
                    weights[name.removeprefix(_PREFIX)] = file.get_tensor(name)
    return weights


def hugging_face_weights(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our names and coalesced layers to those of ``LlamaForCausalLM``."""
    import torch

    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in _NAMES:
            named[_NAMES[name]] = tensor
            continue
        _, number, rest = name.split(".", 2)
        layer = f"model.layers.{number}."
        if rest == "attention.qkv.weight":
            rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
            for part, cut in zip("qkv", torch.split(tensor, rows), strict=True):
                named[f"{layer}self_attn.{part}_proj.weight"] = cut.contiguous()
        elif rest == "mlp.gate_up.weight":
            for part, cut in zip(("gate", "up"), tensor.chunk(2), strict=True):
                named[f"{layer}mlp.{part}_proj.weight"] = cut.contiguous()
        else:
            named[layer + _LAYER_NAMES[rest]] = tensor
    return named


def hugging_face_config(config: Config, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of ``LlamaForCausalLM``."""
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim, "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps, "rope_theta": model.rope_theta,
        "max_position_embeddings": config.train.seq_len, "initializer_range": model.initializer_range,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": tokenizer["bos_id"], "eos_token_id": tokenizer["eos_id"],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Export; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.export", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    export(load(run.config), run, arguments.step, arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
