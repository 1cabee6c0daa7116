"""What torchtitan lacks on a CPU: used there only, so that the real engine trains and is tested without a device.

A GPU or a Trainium device never imports this module.
"""

from __future__ import annotations

import functools
import logging
import os
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import _random as dtensor_random

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

#: What ``torch.cuda.memory_stats`` returns and torchtitan reads.
_NO_MEMORY = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0)


class _Device(types.ModuleType):
    """The functions of ``torch.cuda`` that torchtitan calls."""

    @staticmethod
    def device_count() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), name="CPU")

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        return dict(_NO_MEMORY)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any = None) -> None:
        pass

    reset_peak_memory_stats = empty_cache = synchronize = set_device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def device_module() -> types.ModuleType:
    """Return what stands for ``torch.cuda``."""
    return _Device("cpu")


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, Any]:
    """Compute FlexAttention with a dense mask: its backward pass refuses a CPU."""
    at, batch = torch.arange(q.shape[2]), torch.arange(q.shape[0])
    head = torch.tensor(0)

    def allowed(sequence: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return block_mask.mask_mod(sequence, head, query, key)  # type: ignore[no-any-return]

    over_keys = torch.vmap(allowed, (None, None, 0))
    mask = torch.vmap(torch.vmap(over_keys, (None, 0, None)), (0, None, None))(batch, at, at)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=enable_gqa)
    return out, types.SimpleNamespace(lse=None)


class _RandomNumbers:
    """Gives each shard of a distributed tensor random numbers of its own, and its copies the same ones.

    PyTorch does so where it can move a generator by an offset. On a CPU it lets every process draw the same numbers, so
    that experts, rows and columns of several processes would begin equal, and a mixture's experts stay equal.
    """

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: DTensorSpec, generator: torch.Generator | None = None) -> Iterator[None]:
        shard = 0
        here = spec.mesh.get_coordinate() or ()
        for size, at, placement in zip(spec.mesh.shape, here, spec.placements, strict=True):
            if not placement.is_replicate():
                shard = shard * size + at
        seed = int(torch.randint(1 << 62, (), generator=generator))  # the same in all processes
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed + shard)
            yield


@functools.cache  # what is wrapped, is wrapped once
def adapt() -> None:
    """Make torchtitan train on a CPU. Call it before any other module of torchtitan is imported."""
    from torchtitan.tools import utils

    # About random numbers, and formats that a CPU computes in full precision.
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    setattr(dtensor_random, "_rng_tracker", _RandomNumbers())  # noqa: B010 (another type than PyTorch's)
    logging.getLogger().setLevel(logging.ERROR)  # torchtitan's own: it looks for a GPU
    torch._dynamo.config.disable = True  # the mask's compiled function takes a minute to compile
    device = torch.device("cpu")
    utils.device_type, utils.device_module, utils.get_local_device = "cpu", device_module(), lambda: device
    from torchtitan.distributed import utils as distributed_utils

    distributed_utils.get_local_device = utils.get_local_device
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)
    _sum_then_divide()
    _count_integers()
    dist.all_to_all = _all_to_all  # type: ignore[assignment]


def _sum_then_divide() -> None:
    """Let FSDP divide after a sum: gloo has no sum of products."""
    divide = FSDPModule.set_gradient_divide_factor

    def set_factor(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = set_factor  # type: ignore[method-assign]


def _count_integers() -> None:
    """Let mixtures count tokens: the histogram of integers exists on GPUs only."""
    histogram = torch.histc

    def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
        return histogram(values.float(), bins=bins, min=min, max=max).to(values.dtype)

    torch.histc = histc  # type: ignore[assignment]


def _all_to_all(output: list[Tensor], input: list[Tensor], group: Any = None) -> None:  # noqa: A002
    """Exchange tensors of any sizes: experts get different numbers of tokens, and gloo wants lists of equal tensors.

    PyTorch 2.14's mixtures use it; with 2.13 torchtitan exchanges one tensor.
    """
    sizes = [part.numel() for part in output]
    received = output[0].new_empty(sum(sizes))
    sent = torch.cat([part.reshape(-1) for part in input])
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in input], group=group)
    for part, values in zip(output, torch.split(received, sizes), strict=True):
        part.copy_(values.view_as(part))
