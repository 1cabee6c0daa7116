"""What runs the model for the harness, by ``eval.runner``: the only makers of its model classes.

`hf` runs on CPU and CUDA and is what the tests run. `vllm` and `neuron` hand the exported folder to the harness's own
classes for these; their packages are optional, and neither has been tried here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.harness import quiet, wrap
from eval.model import DTYPE, Loaded, device_name
from hlatctl.run.errors import DependencyError


@dataclass(frozen=True)
class _Optional:
    """A runner whose package is not among this project's dependencies.

    Args:
        package: import name.
        distribution: what has the version.
        hint: how it is had.
    """

    package: str
    distribution: str
    hint: str


_OPTIONAL = {
    "vllm": _Optional("vllm", "vllm", "pip install 'hlatctl[vllm]' in an environment of its own"),
    "neuron": _Optional(
        "optimum.neuron", "optimum-neuron", "pip install 'optimum[neuronx]' in an environment with the Neuron SDK"
    ),
}
#: Number format that each computes in, whatever the weights are stored in; the harness's default for Neuron is refused
#: by Neuron itself.
DTYPES = {"hf": DTYPE, "vllm": "bfloat16", "neuron": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a runner is made from.

    Args:
        folder: Hugging Face folder with weights and tokenizer.
        loaded: the same in memory, loaded when it is first called.
        max_length: tokens of context.
        batch_size: requests at once.
        seed: of sampled answers.
        tensor_parallel_size: devices that have the model together.
    """

    folder: Path
    loaded: Callable[[], Loaded]
    max_length: int
    batch_size: int
    seed: int
    tensor_parallel_size: int = 1


def check(name: str) -> None:
    """Refuse a runner whose package is not installed.

    Raises:
        DependencyError: names the package and how it is had.
    """
    optional = _OPTIONAL.get(name)
    if optional is None:
        return
    try:
        found = importlib.util.find_spec(optional.package)
    except ModuleNotFoundError:  # of the package above it
        found = None
    if found is None:
        raise DependencyError(
            f"eval.runner={name}: the package {optional.package} is not installed", hint=optional.hint
        )


def versions(name: str) -> dict[str, str]:
    """Version of a runner's own package, by import name; none of `hf`, whose packages every evaluation names."""
    optional = _OPTIONAL.get(name)
    return {optional.package: metadata.version(optional.distribution)} if optional else {}


def device(name: str, wanted: str) -> str:
    """What a runner computes on, with the device's own name where it has one.

    Args:
        name: the runner.
        wanted: ``backend.device``, which counts for `hf` only.
    """
    return device_name({"hf": wanted, "vllm": "cuda", "neuron": "neuron"}[name])


def make(name: str, request: Request) -> Any:
    """The harness's model of a runner that :func:`check` has passed."""
    quiet()
    if name == "hf":
        return wrap(request.loaded(), batch_size=request.batch_size)
    if name == "vllm":
        from lm_eval.models.vllm_causallms import VLLM as harness_class
    else:
        from lm_eval.models.neuron_optimum import NEURON_HF as harness_class
    return harness_class(**arguments(name, request))


def arguments(name: str, request: Request) -> dict[str, Any]:
    """What the harness's class of an optional runner is called with."""
    common = {
        "pretrained": str(request.folder),
        "batch_size": request.batch_size,
        "dtype": DTYPES[name],
        "trust_remote_code": False,
    }
    if name == "vllm":
        size = request.tensor_parallel_size
        return {**common, "max_model_len": request.max_length, "seed": request.seed, "tensor_parallel_size": size}
    return {**common, "max_length": request.max_length, "tp_degree": request.tensor_parallel_size}
