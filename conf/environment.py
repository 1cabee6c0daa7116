"""Environment variables that the configuration sets for training processes; the same for every launcher.

The configuration takes precedence over the shell that starts a run. Differences are reported (:func:`collisions`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conf.devices import DEVICES
from conf.registries import BACKENDS
from conf.schema import Config
from hlatctl.run.errors import DependencyError, install
from hlatctl.run.provenance import package_versions
from hlatctl.run.redact import MASK, hide, is_secret_name

COMPILER_FLAGS = "NEURON_CC_FLAGS"
STOCHASTIC_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"

#: Deprecated switches of torch-xla that turn the model's FP32 into BF16.
CASTING = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")

#: Variables that other keys of the configuration set, with these keys.
SET_ELSEWHERE = {
    COMPILER_FLAGS: "backend.compiler_flags",
    STOCHASTIC_ROUNDING: "precision.name",
    "NEURON_COMPILE_CACHE_URL": "cluster.worker_cache_dir",
    "TORCH_NEURONX_NEFF_CACHE_DIR": "cluster.worker_cache_dir",
    "TORCHINDUCTOR_CACHE_DIR": "cluster.worker_cache_dir",
    "OMP_NUM_THREADS": "cluster.threads_per_process",
}
#: Packages of the two software stacks that both contain a package torch-neuronx.
NEURON_PACKAGES = ("torch", "torch-neuronx", "torch-xla", "libneuronxla", "neuronx-cc", "neuronx-distributed")

#: Distributions that torchtitan is looked up by; AWS's fork is installed from a clone (its "How to set up TorchTitan
#: Neuron", 2026-10-18, doesn't say under which of the names).
TORCHTITAN_PACKAGES = ("torchtitan", "torchtitan-neuron")

#: The first PyTorch whose torch-neuronx is TorchNeuron; 2.9 is the last on PyTorch/XLA (Neuron SDK 2.29's release
#: notes of the PyTorch component).
_FIRST_TORCH_NEURON = (2, 10)

#: The torchtitan that ``trainer/torchtitan`` is written for: beginning of its version, and how to install it.
_TORCHTITAN, _INSTALL_TORCHTITAN = "0.3.", "pip install --no-deps torchtitan==0.3.0 (docs/engines.md)"
#: What torchtitan 0.3 can't be imported without, or trains with, besides torch and what hlatctl[train] installs.
_TORCHTITAN_NEEDS = (
    "datasets",
    "einops",
    "pillow",
    "spmd_types",
    "tensorboard",
    "torch_checkpointing",
    "torchdata",
    "tyro",
)
#: The same on Trainium: AWS's fork, with its support matrix ("What is TorchTitan Neuron?", Neuron 2.33, 2026-10).
_TORCHTITAN_NEURON, _INSTALL_TORCHTITAN_NEURON = (
    "0.2.2+neuron.",
    "install Neuron SDK 2.33 and github.com/aws-neuron/torchtitan-neuron (docs/neuron.md, TorchTitan Neuron)",
)
_WITH_TORCHTITAN_NEURON = {"torch": "2.14.", "torch-neuronx": "2.14.3."}
_PYTHONS_OF_TORCHTITAN_NEURON = ((3, 12), (3, 14))


@dataclass(frozen=True, kw_only=True)
class Collision:
    """A variable whose value in the configuration differs from the environment's.

    Args:
        configured: value in the configuration; None if the configuration unsets the variable.
        present: value in the environment, without secrets.
    """

    name: str
    configured: str | None
    present: str

    def __str__(self) -> str:
        used = "unset" if self.configured is None else repr(self.configured)
        return f"{self.name}: is {self.present!r} in this environment; the configuration's value is used: {used}"


def can_train(config: Config) -> bool:
    """Return whether the environment of this process has what the backend needs."""
    check = BACKENDS.part(config.backend.name, "software")
    try:
        if check:
            check(config)
    except DependencyError:
        return False
    return True


def variables(config: Config) -> dict[str, str]:
    """Return the variables to set for training processes, in addition to those of every job."""
    backend = config.backend
    values = {name: text for name, text in DEVICES[backend.device].variables.items() if name not in backend.env}
    values |= {name: str(value) for name, value in backend.env.items() if value is not None}
    if backend.compiler_flags:
        values[COMPILER_FLAGS] = " ".join(backend.compiler_flags)
    if backend.device == "neuron":
        # Set explicitly, because the runtime's default depends on the deprecated XLA_USE_BF16 and XLA_DOWNCAST_BF16.
        values[STOCHASTIC_ROUNDING] = "1" if config.precision.name == "bf16_sr" else "0"
    return values


def cache_variable(config: Config) -> str:
    """Return the variable with the folder of the compiler's cache ("Neuron Persistent Cache"; ``conf.devices``)."""
    torch_xla = config.backend.kind.torch_xla
    return "NEURON_COMPILE_CACHE_URL" if torch_xla else DEVICES[config.backend.device].cache_variable


def unset(config: Config) -> tuple[str, ...]:
    """Return the variables to unset for training processes, sorted."""
    return tuple(sorted(name for name, value in config.backend.env.items() if value is None))


def collisions(config: Config, environment: Mapping[str, str]) -> list[Collision]:
    """Return the variables whose values in an environment and in the configuration differ, by name."""
    wanted: dict[str, str | None] = {**variables(config), **dict.fromkeys(unset(config))}
    return [
        Collision(name=name, configured=value, present=MASK if is_secret_name(name) else hide(environment[name]))
        for name, value in sorted(wanted.items())
        if name in environment and environment[name] != value
    ]


def software_problem(config: Config, versions: Mapping[str, str]) -> str:
    """Return why the installed packages can't train this configuration on Trainium; empty if they can.

    Two products share the name torch-neuronx. Up to 2.9 it is PyTorch/XLA's plug-in, which NeuronX Distributed needs;
    later it is TorchNeuron, a device of PyTorch itself. One environment can't contain both.

    Args:
        versions: versions of the installed packages among :data:`NEURON_PACKAGES`.
    """
    installed = versions.get("torch-neuronx")
    if config.backend.device != "neuron" or installed is None:
        return ""
    here = f"backend.name={config.backend.name}: torch-neuronx {installed} is installed"
    is_torch_neuron = _release(installed) >= _FIRST_TORCH_NEURON
    needs_torch_xla = config.backend.kind.torch_xla
    if needs_torch_xla and is_torch_neuron:
        return f"{here}, which is TorchNeuron; NeuronX Distributed needs torch-neuronx 2.9 on torch-xla"
    if not needs_torch_xla and not is_torch_neuron:
        return f"{here}, which is for torch-xla; device neuron needs TorchNeuron, torch-neuronx 2.13 or newer"
    if is_torch_neuron and "neuronx-distributed" in versions:
        return f"{here} beside neuronx-distributed {versions['neuronx-distributed']}: two stacks in one environment"
    torch = versions.get("torch", "")
    if _release(torch) != _release(installed):
        return f"{here} beside torch {torch or 'none'}; the two must be of one release"
    return ""


def torchtitan_problem(
    config: Config, versions: Mapping[str, str], python: tuple[int, int] = sys.version_info[:2]
) -> str:
    """Return why the installed packages can't train with torchtitan; empty if they can.

    Args:
        versions: versions of the installed packages, by name.
        python: the interpreter's version.
    """
    here = f"backend.name={config.backend.name}"
    installed = next((versions[name] for name in reversed(TORCHTITAN_PACKAGES) if name in versions), None)
    if installed is None:
        return f"{here}: the package torchtitan is not installed"
    if config.backend.device != "neuron":
        if not installed.startswith(_TORCHTITAN):
            return f"{here}: torchtitan {installed} is installed; {_TORCHTITAN}* works"
        missing = [name for name in _TORCHTITAN_NEEDS if name not in versions]
        return f"{here}: torchtitan needs packages that are not installed: {', '.join(missing)}" if missing else ""
    here += " with backend.device=neuron"
    if not installed.startswith(_TORCHTITAN_NEURON):
        return f"{here}: torchtitan {installed} is installed; AWS's torchtitan-neuron {_TORCHTITAN_NEURON}* works"
    for name, works in _WITH_TORCHTITAN_NEURON.items():
        if not versions.get(name, "").startswith(works):
            found = f"{name} {versions[name]} is installed" if name in versions else f"{name} is not installed"
            return f"{here}: {found}; {works}* works"
    first, last = _PYTHONS_OF_TORCHTITAN_NEURON
    if not first <= python <= last:
        return f"{here}: this is Python {_dotted(python)}; Python {_dotted(first)} to {_dotted(last)} work"
    return ""


def check_torchtitan(config: Config) -> None:
    """Raise a DependencyError if this environment lacks what torchtitan needs, or has versions that don't work."""
    names = (*TORCHTITAN_PACKAGES, *_TORCHTITAN_NEEDS, *_WITH_TORCHTITAN_NEURON)
    if problem := torchtitan_problem(config, package_versions(names)):
        how = f"{install('torchtitan')}, then {_INSTALL_TORCHTITAN}"
        raise DependencyError(problem, hint=_INSTALL_TORCHTITAN_NEURON if config.backend.device == "neuron" else how)


def compiler_problem(device: str) -> str:
    """Return what this machine lacks for ``torch.compile``; empty: nothing."""
    language = DEVICES[device].compiler
    if language == "none":
        return ""
    # torch/_inductor/cpp_builder.py and triton/runtime/build.py
    usual = {"C++": ["clang++" if sys.platform == "darwin" else "g++"], "C": ["gcc", "clang"]}[language]
    variable = {"C++": "CXX", "C": "CC"}[language]
    names = [os.environ[variable]] if os.environ.get(variable) else usual
    if not any(map(shutil.which, names)):
        return f"no {language} compiler ({' or '.join([*usual, f'${variable}'])}) found"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's, as Triton does
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if language == "C" and not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"{header} not found (apt-get install python{version}-dev)"
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers: (2, 9) for ``2.9.0.2.13.26312+x``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
