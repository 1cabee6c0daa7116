"""What runs the model for the harness, by ``eval.runner``: the only makers of its model classes.

`hf` runs on CPU and CUDA and is what the tests run. `vllm` and `neuron` hand the exported folder to the harness's own
classes for these; their packages are optional, and neither has been tried here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.harness import quiet, wrap
from eval.model import Loaded
from hlatctl.run.errors import DependencyError

#: The package without which a runner can't be asked for, and how it is had.
_PACKAGES = {
    "vllm": ("vllm", "pip install 'hlatctl[vllm]' in an environment of its own"),
    "neuron": ("optimum.neuron", "pip install 'optimum[neuronx]' in an environment with the Neuron SDK"),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a runner is made from.

    Args:
        folder: Hugging Face folder with weights and tokenizer.
        loaded: the same in memory, loaded when it is first called.
        max_length: tokens of context.
        batch_size: requests at once.
        seed: of sampled answers.
    """

    folder: Path
    loaded: Callable[[], Loaded]
    max_length: int
    batch_size: int
    seed: int


def check(name: str) -> None:
    """Refuse a runner whose package is not installed.

    Raises:
        DependencyError: names the package and how it is had.
    """
    if name not in _PACKAGES:
        return
    package, hint = _PACKAGES[name]
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the package above it
        found = None
    if found is None:
        raise DependencyError(f"eval.runner={name}: the package {package} is not installed", hint=hint)


def make(name: str, request: Request) -> Any:
    """The harness's model of a runner that :func:`check` has passed."""
    quiet()
    return {"hf": _hf, "vllm": _vllm, "neuron": _neuron}[name](request)


def _hf(request: Request) -> Any:
    return wrap(request.loaded(), batch_size=request.batch_size)


def _vllm(request: Request) -> Any:
    from lm_eval.models.vllm_causallms import VLLM

    return VLLM(pretrained=str(request.folder), max_model_len=request.max_length, batch_size=request.batch_size,
                seed=request.seed, trust_remote_code=False)  # fmt: skip


def _neuron(request: Request) -> Any:
    from lm_eval.models.neuron_optimum import NEURON_HF

    return NEURON_HF(pretrained=str(request.folder), max_length=request.max_length, batch_size=request.batch_size,
                     trust_remote_code=False)  # fmt: skip
