"""Plain PyTorch on CPUs (gloo) and CUDA (nccl): data parallel, whole replicas."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.schema import Config, OptimizerConfig
from hlatctl.run.errors import DependencyError
from trainer.backends.base import LossFunction
from trainer.loss import cross_entropy
from trainer.optim import FlatAdamW

#: FP32 peak outside of the tensor cores, FLOP/s, by the beginning of the device's name (vendor's data sheets).
_FP32_PEAK_FLOPS_PER_S = {"NVIDIA A100": 19.5e12, "NVIDIA H100 80GB HBM3": 67e12, "NVIDIA H200": 67e12}
#: A peer that is silent this long is gone; far above a checkpoint's or a compilation's time.
_TIMEOUT = timedelta(minutes=15)


class TorchNative:
    """See :class:`trainer.backends.base.Backend`; torchrun's variables say which process this is."""

    def __init__(self, config: Config) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data_parallel_rank, self.data_parallel_size = self.rank, self.world_size
        self.warnings: list[str] = []
        self.compiles = config.backend.compile
        torch.set_num_threads(config.cluster.threads_per_process)
        self.device = _device(config.backend.device)
        if self.world_size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        if self.compiles and self.device.type == "cpu" and not _cpp_compiler():
            self.compiles = False
            self.warnings.append("no C++ compiler (g++ or $CXX) found: training runs uncompiled, which is slower")

    def parallelize(self, model: nn.Module) -> None:
        """Every process holds the whole model; equal seeds made equal replicas."""
        model.to(self.device)

    def loss_function(self, model: nn.Module) -> LossFunction:
        """Hidden states by the compiled decoder, then the fused output projection and cross-entropy."""
        forward = torch.compile(model, fullgraph=True, dynamic=False) if self.compiles else model
        weight = model.get_submodule("head").weight

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(forward(inputs), weight, targets)  # type: ignore[arg-type]

        return loss

    def optimizer(self, model: nn.Module, config: OptimizerConfig, *, extra: int) -> FlatAdamW:
        """AdamW over flat buffers."""
        return FlatAdamW(model, config, extra=extra)

    def reduce_sum(self, tensor: Tensor) -> None:
        """One all-reduce."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def step_boundary(self) -> None:
        """Nothing waits here: PyTorch executes eagerly."""

    def from_rank0(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, sent as JSON text."""
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(received, padded)
        pairs = zip(received, sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in pairs]

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Safetensors shards through torch.distributed.checkpoint; a replicated tensor is written by one process."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = HuggingFaceStorageWriter(os.fspath(folder), save_distributed=True)
        with _alone_is_no_warning():
            save(dict(tensors), storage_writer=writer, no_dist=self.world_size == 1)

    def load(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Safetensors shards, read in place; no pickle is involved."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = HuggingFaceStorageReader(os.fspath(folder))
        with _alone_is_no_warning():
            load(dict(tensors), storage_reader=reader, no_dist=self.world_size == 1)

    def compile_counters(self) -> dict[str, int]:
        """From Inductor's own counters; what it can't cache counts as a miss."""
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        misses = found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]
        return {"hits": found["fxgraph_cache_hit"], "misses": misses}

    def peak_flops_per_s(self) -> float | None:
        """From the table of known devices."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((peak for known, peak in _FP32_PEAK_FLOPS_PER_S.items() if name.startswith(known)), None)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise DependencyError(
            f"backend.device={kind}: process {local_rank} of this node has no such device "
            f"({torch.cuda.device_count()} found)",
            hint="set backend.device=cpu, or cluster.processes_per_node to the number of devices",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def _alone_is_no_warning() -> Iterator[None]:
    """No word from torch about a process that is alone, where that was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _cpp_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
