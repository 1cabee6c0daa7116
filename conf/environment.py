"""What a training process finds in its environment, from the configuration: pure, and the same for every launcher.

Who wins: the configuration. What the shell that starts a run has otherwise is overridden for the training processes,
and told (:func:`collisions`), never silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from conf.devices import DEVICES
from conf.schema import Config
from hlatctl.run.redact import MASK, hide, is_secret_name

COMPILER_FLAGS = "NEURON_CC_FLAGS"
STOCHASTIC_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"

#: Deprecated switches of torch-xla that make BF16 of what the model says is FP32.
CASTING = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")

#: Variables that have a place of their own in the configuration, and that place.
SET_ELSEWHERE = {
    COMPILER_FLAGS: "backend.compiler_flags",
    STOCHASTIC_ROUNDING: "precision.name",
    "NEURON_COMPILE_CACHE_URL": "cluster.worker_cache_dir",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "cluster.worker_cache_dir",
    "TORCHINDUCTOR_CACHE_DIR": "cluster.worker_cache_dir",
    "OMP_NUM_THREADS": "cluster.threads_per_process",
}
#: Packages of the two stacks that share the name torch-neuronx.
NEURON_PACKAGES = ("torch", "torch-neuronx", "torch-xla", "libneuronxla", "neuronx-cc", "neuronx-distributed")

#: The first PyTorch whose torch-neuronx is TorchNeuron; 2.9 is the last on PyTorch/XLA (Neuron SDK 2.29's release
#: notes of the PyTorch component).
_FIRST_TORCH_NEURON = (2, 10)


@dataclass(frozen=True, kw_only=True)
class Collision:
    """A variable that the configuration and the surroundings set to different values.

    Args:
        configured: none: the configuration unsets it.
        found: what the surroundings have, without secrets.
    """

    name: str
    configured: str | None
    found: str

    def __str__(self) -> str:
        used = "unset" if self.configured is None else repr(self.configured)
        return f"{self.name}: is {self.found!r} in this environment; the configuration's is used: {used}"


def variables(config: Config) -> dict[str, str]:
    """What is set for the training processes, besides what every job gets."""
    backend = config.backend
    found = {name: str(value) for name, value in backend.env.items() if value is not None}
    if backend.compiler_flags:
        found[COMPILER_FLAGS] = " ".join(backend.compiler_flags)
    if backend.device == "neuron":
        # The runtime's default is off, and on with the deprecated XLA_USE_BF16 and XLA_DOWNCAST_BF16: so it is said.
        found[STOCHASTIC_ROUNDING] = "1" if config.precision.name == "bf16_sr" else "0"
    return found


def cache_variable(config: Config) -> str:
    """The variable that tells the compiler where its cache is ("Neuron Persistent Cache"; ``conf.devices``)."""
    return "NEURON_COMPILE_CACHE_URL" if config.backend.name == "nxd" else DEVICES[config.backend.device].cache_variable


def unset(config: Config) -> tuple[str, ...]:
    """What is taken from the training processes' environment, sorted."""
    return tuple(sorted(name for name, value in config.backend.env.items() if value is None))


def collisions(config: Config, environment: Mapping[str, str]) -> list[Collision]:
    """Where an environment says otherwise than the configuration, by name."""
    wanted: dict[str, str | None] = {**variables(config), **dict.fromkeys(unset(config))}
    return [
        Collision(name=name, configured=value, found=MASK if is_secret_name(name) else hide(environment[name]))
        for name, value in sorted(wanted.items())
        if name in environment and environment[name] != value
    ]


def software_problem(config: Config, versions: Mapping[str, str]) -> str:
    """Why the installed packages can't train this configuration on Trainium; empty if nothing is wrong.

    Two products share the name torch-neuronx: up to 2.9 it is PyTorch/XLA's plug-in, which NeuronX Distributed stands
    on; later it is TorchNeuron, a device of PyTorch itself. They can't be mixed in one environment.

    Args:
        versions: of :data:`NEURON_PACKAGES`, as far as they are installed.
    """
    found = versions.get("torch-neuronx")
    if config.backend.device != "neuron" or found is None:
        return ""
    here = f"backend.name={config.backend.name}: torch-neuronx {found} is installed"
    is_torch_neuron = _release(found) >= _FIRST_TORCH_NEURON
    if config.backend.name == "nxd" and is_torch_neuron:
        return f"{here}, which is TorchNeuron; NeuronX Distributed needs torch-neuronx 2.9 on torch-xla"
    if config.backend.name == "torch_native" and not is_torch_neuron:
        return f"{here}, which is for torch-xla; device neuron needs TorchNeuron, torch-neuronx 2.13 or newer"
    if is_torch_neuron and "neuronx-distributed" in versions:
        return f"{here} beside neuronx-distributed {versions['neuronx-distributed']}: two stacks in one environment"
    torch = versions.get("torch", "")
    if _release(torch) != _release(found):
        return f"{here} beside torch {torch or 'none'}; the two must be of one release"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers: ``2.9.0.2.13.26312+x`` is (2, 9)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
