"""``python -m tests.trainer.traced CONFIG``: trace a step of one rank of a large job, without a device.

Tensors are fake: they have shapes, dtypes and devices, but no values, so reading one on the host is an error.
Collectives of the process group ``fake`` return immediately. The device is PyTorch's backend for external devices under
the name ``neuron``, with a GPU's facts: a tensor that is left on the host is an error too. Prints the trace as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from conf.devices import DEVICES
from conf.load import load

NAME = "neuron"


class Stream:
    """A stream, or an event, that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Return immediately."""

    def wait_event(self, _: Any) -> None:
        """Return immediately."""

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def record(self, _: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return immediately."""

    def wait(self, _: Any = None) -> None:
        """Return immediately."""


class Module(_DummyBackendModule):
    Stream = Event = Stream

    def __init__(self) -> None:
        pass

    def current_stream(self, _: Any = None) -> Any:
        return Stream()

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def device_count(self) -> int:
        return 8

    def is_available(self) -> bool:
        return True

    def set_device(self, _: Any) -> None:
        """Accept any."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, _: Any = None) -> None:
        """Return immediately."""


class Collectives(TorchDispatchMode):
    """Counts the operations of process groups by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in function._schema.name:
            self.counts[function._schema.name.split("::")[1].strip("_")] += 1
        return function(*args, **(kwargs or {}))


def _prepare_inside(fake: FakeTensorMode, module: Any) -> None:
    """Let tensors be fake from the sharding on: parameters that are fake already could not get another dtype."""
    prepare = module.prepare

    def begin(*args: Any, **options: Any) -> None:
        fake.__enter__()
        prepare(*args, **options)

    module.prepare = begin


def flash(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Attention as on a GPU, which keeps no scores; PyTorch's choice for unknown devices would."""
    assert attn_mask is None
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) if enable_gqa else part for part in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]  # type: ignore[no-any-return]


def main() -> None:
    """Trace a step with one micro-batch: the tracker of memory knows a module's first call only."""
    config = load(Path(sys.argv[1]))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.world_size), "LOCAL_WORLD_SIZE": "8"}
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    # With a GPU's facts; a fake tensor can't be pinned.
    DEVICES[NAME] = replace(DEVICES["cuda"], process_group="fake", pins_host_memory=False)
    dist.init_process_group("fake", rank=0, world_size=config.world_size, store=FakeStore())
    from trainer import rendezvous
    from trainer.backends import torch_native

    setattr(rendezvous, "HOST_PROCESS_GROUP", "fake")  # noqa: B010 - gloo would look for the other ranks
    setattr(functional, "scaled_dot_product_attention", flash)  # noqa: B010 - for all modules
    backend = torch_native.TorchNative(config)
    setattr(backend, "gather", lambda mine: [mine])  # noqa: B010 - there are no other ranks
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    _prepare_inside(fake, torch_native)
    model = backend.build_model(document_end_id=0 if config.data.mask_across_documents else None)
    optimizer = backend.optimizer(model)
    share = config.train.global_batch_size // backend.data_parallel_size
    memory = MemTracker()
    memory.track_external(model, optimizer.gradients, *optimizer.tensors().values())
    tokens = torch.zeros(share, config.train.seq_len, dtype=torch.int64)
    with memory, Collectives() as collectives:
        optimizer.zero_grad()
        loss = backend.forward_backward(model, tokens, tokens)
        backend.update(optimizer, loss, lr=1e-4, step=1)
    peak = memory.get_tracker_snapshot("peak")
    devices = {str(tensor.device) for tensor in optimizer.tensors().values()} | {str(loss.device)}
    result = {
        "devices": sorted(devices),
        "collectives": collectives.counts,
        "parameters": sum(value.numel() for value in optimizer._values.values()),
        "peak_bytes": {str(device): sizes["Total"] for device, sizes in peak.items()},
    }
    print("traced", json.dumps(result))


if __name__ == "__main__":
    main()
