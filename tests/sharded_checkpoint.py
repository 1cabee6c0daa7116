"""A run with random weights in a checkpoint of two ranks, made without training."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

from conf.initial_weights import MODEL
from conf.load import dump
from conf.schema import Config, EvalConfig, ModelConfig, TrainConfig
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.paths import RunPaths

STEP = 5
TINY = ModelConfig(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=True
)


def write_run(
    root: Path, tokenizer: Path, *, model: ModelConfig = TINY, bfloat16: bool = False, keys: EvalConfig | None = None
) -> RunPaths:
    """Write a run's directory with the checkpoint of step 5; ranks have rows of some tensors and columns of others.

    Args:
        root: the new run directory.
        tokenizer: folder of a tokenizer of at most 512 tokens, whose ids 0 and 1 begin and end a document.
        bfloat16: whether the weights are bfloat16 instead of float32.
        keys: the section ``eval``.
    """
    import torch

    from trainer.checkpoint.shards import INDEX, compose, file_name, write_shard
    from trainer.model.decoder import Llama

    run, seq_len = RunPaths(root), 256
    folder = run.checkpoint(STEP)
    folder.mkdir(parents=True)
    config = Config(runs_dir=str(root.parent), model=model, train=TrainConfig(seq_len=seq_len))
    files.write_text(run.config, files.seal_lines(dump(replace(config, eval=keys or EvalConfig(limit=2)))))
    described = {"path": str(tokenizer), "bos_id": 0, "eos_id": 1}
    files.write_sealed_json(run.dataset, {"tokenizer": described})
    torch.manual_seed(0)
    tensors = {f"model.{name}": tensor for name, tensor in Llama(model, seq_len).state_dict().items()}
    tensors |= {f"exp_avg.{name}": tensor for name, tensor in tensors.items()}  # not read
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    parts = [
        {name: _part(tensor.to(dtype), dimension=math.prod(map(ord, name)) % tensor.ndim, rank=rank)
         for name, tensor in tensors.items()}
        for rank in range(2)
    ]  # fmt: skip
    shards = [write_shard(folder / file_name(rank + 1), chunks) for rank, chunks in enumerate(parts)]
    files.write_text(folder / INDEX, compose({str(s.entry["path"]): s.chunks for s in shards}).text)
    files.write_json(folder / MODEL, asdict(model))
    write_manifest(folder, step=STEP, tokens=1000, world={"data_parallel_size": 2})
    return run


def _part(tensor, *, dimension: int, rank: int):  # type: ignore[no-untyped-def]
    from trainer.checkpoint.shards import Chunk

    half = tensor.shape[dimension] // 2
    begin, size = (0, half) if rank == 0 else (half, tensor.shape[dimension] - half)
    offsets = tuple(begin if number == dimension else 0 for number in range(tensor.ndim))
    values = tensor.narrow(dimension, begin, size).contiguous()
    return Chunk(values=values, offsets=offsets, shape=tuple(tensor.shape))
