"""``python -m tests.trainer.fake_neuron ARGUMENTS``: the trainer on a device named ``neuron`` that computes on the CPU.

PyTorch's backend for external devices (PrivateUse1) is renamed, like TorchNeuron does. Its tensors wrap CPU tensors,
report the device ``neuron`` and, like a real device's, can't be mixed with CPU tensors. The process-group backend
``neuron`` is gloo, and the compiler ``neuron`` is only a name.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "neuron"
#: Operations that may copy a tensor to another device; all others refuse mixed devices.
_CROSSING = {"aten::_to_copy", "aten::copy_", "aten::to.device"}
#: Registrations end when these are deleted.
_libraries: list[torch.library.Library] = []
#: Calls of operations that only a device has.
calls: dict[str, int] = {"synchronize": 0, "collective": 0}


class OnNeuron(torch.Tensor):
    """A tensor of the device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnNeuron:
        made: OnNeuron = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return on_cpu(function, args, kwargs or {})

    def tolist(self) -> Any:
        """Return the values; PyTorch doesn't provide this for subclasses."""
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnNeuron({self.held!r})"


def on_cpu(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on the wrapped CPU tensors."""
    name, asked = function.name(), kwargs.get("device")
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    here = [each for each in tensors if isinstance(each, OnNeuron)]
    strangers = [each for each in tensors if not isinstance(each, OnNeuron) and each.dim()]
    if name.startswith("c10d::"):
        calls["collective"] += 1
    elif here and strangers and name.split(".")[0] not in _CROSSING:
        raise RuntimeError(f"{name}: expected all tensors on {NAME}, found one on {strangers[0].device}")
    stays = torch.device(asked).type == NAME if asked is not None else bool(here) or not tensors
    inner = {**kwargs, "device": torch.device("cpu")} if asked is not None and stays else kwargs
    inner_args, inner_kwargs = pytree.tree_map_only(OnNeuron, lambda each: each.held, (args, inner))
    result = function(*inner_args, **inner_kwargs)
    if not stays:
        return result
    wrapped = pytree.tree_map_only(torch.Tensor, OnNeuron, result)
    return return_and_correct_aliasing(function, args, kwargs, wrapped)  # type: ignore[no-untyped-call]


class NeuronModule(_DummyBackendModule):
    """``torch.neuron``: what a device's module offers to PyTorch and to a trainer."""

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        calls["synchronize"] += 1

    def current_stream(self, device: Any = None) -> object:
        return self

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_device_name(self, device: Any = None) -> str:
        return "fake"


def register() -> None:
    """Make PyTorch know the device, its process groups and its compiler, as importing ``torch_neuronx`` does."""
    sys.modules["torch_neuronx"] = types.ModuleType("torch_neuronx")
    _setup_privateuseone_for_python_backend(NAME, NeuronModule())
    library: Any = torch.library.Library  # untyped
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    everything.fallback(lambda function, *args, **kwargs: on_cpu(function, args, kwargs), "PrivateUse1")
    # torch.tensor() copies below the level of tensor classes, where PyTorch does not find the fallback.
    copy = torch.ops.aten.copy_.default
    aten.impl("copy_", lambda to, of, non_blocking=False: on_cpu(copy, (to, of, non_blocking), {}), "PrivateUse1")
    _libraries.extend((everything, aten))

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend(NAME, group, devices=[NAME, "cpu"])

    # Graphs are not traced here: PyTorch can't look through such a tensor as it looks through a device's.
    torch._dynamo.register_backend(lambda graph, inputs: graph.forward, name=NAME)
    torch.compiler.set_stance("force_eager")


if __name__ == "__main__":
    register()
    from hlatctl.run.errors import run_main
    from trainer.__main__ import main

    code = run_main(lambda: main(sys.argv[1:]))
    print("calls", json.dumps(calls), flush=True)
    sys.exit(code)
