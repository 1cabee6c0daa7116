"""The environment of training processes: what is derived, what is refused, what collides, which stacks do not mix."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from conf.compose import compose
from conf.environment import (
    check_torchtitan,
    collisions,
    compiler_problem,
    software_problem,
    torchtitan_problem,
    unset,
    variables,
)
from conf.fingerprint import graph_fingerprint
from conf.schema import Config
from hlatctl.run.errors import ConfigError, DependencyError
from tests.conf.test_validate import config_with

NXD = {"torch": "2.9.1", "torch-neuronx": "2.9.0.2.13.26312", "neuronx-distributed": "0.18.27753"}
TORCH_NEURON = {"torch": "2.14.0", "torch-neuronx": "2.14.3.0"}


def nxd(*overrides: str) -> Config:
    return compose(["backend=nxd", "cluster=simulated", *overrides])


@pytest.mark.parametrize(("precision", "value"), [("bf16_sr", "1"), ("mixed", "0"), ("bf16", "0"), ("fp32", "0")])
@pytest.mark.parametrize("backend", ["nxd", "neuron"])
def test_stochastic_rounding_follows_the_precision(backend: str, precision: str, value: str) -> None:
    config = config_with(
        backend__name="nxd" if backend == "nxd" else "torch_native", backend__device="neuron", precision__name=precision
    )
    assert variables(config)["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == value


def test_a_laptop_gets_no_variable_of_the_device() -> None:
    assert variables(Config()) == {}
    assert unset(Config()) == ()


@pytest.mark.parametrize(
    ("env", "value"),
    [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "a:b"}, "a:b"), ({"PYTORCH_ALLOC_CONF": None}, None)],
)
def test_a_gpus_allocator_can_grow_its_segments(env: dict[str, str | None], value: str | None) -> None:
    config = config_with(backend__device="cuda", backend__env=env)
    assert variables(config).get("PYTORCH_ALLOC_CONF") == value


def test_what_casts_behind_the_models_back_is_unset() -> None:
    assert unset(nxd()) == ("XLA_DOWNCAST_BF16", "XLA_USE_BF16")


def test_an_override_changes_adds_and_takes_away() -> None:
    config = nxd(
        "backend.env.NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=31",
        "+backend.env.NEURON_EXPERIMENTAL_COMPRESS_RG=1",
        "backend.env.FI_EFA_FORK_SAFE=null",
        "backend.compiler_flags=['--model-type=transformer']",
    )
    values = variables(config)
    assert values["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "31"
    assert values["NEURON_EXPERIMENTAL_COMPRESS_RG"] == "1"
    assert values["NEURON_CC_FLAGS"] == "--model-type=transformer"
    assert "FI_EFA_FORK_SAFE" in unset(config)
    assert "FI_EFA_FORK_SAFE" not in values


def test_only_other_values_collide_and_the_configuration_wins() -> None:
    around = {"MALLOC_ARENA_MAX": "64", "FI_PROVIDER": "tcp", "XLA_USE_BF16": "1", "PATH": "/bin"}
    assert [str(collision) for collision in collisions(nxd(), around)] == [
        "FI_PROVIDER: is 'tcp' in this environment; the configuration's value is used: 'efa'",
        "XLA_USE_BF16: is '1' in this environment; the configuration's value is used: unset",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+backend.env.NEURON_CC_FLAGS=-O1", "backend.env.NEURON_CC_FLAGS: is set by backend.compiler_flags\nhint: "),
        (
            "+backend.env.NEURON_RT_STOCHASTIC_ROUNDING_EN=1",
            "backend.env.NEURON_RT_STOCHASTIC_ROUNDING_EN: is set by precision.name",
        ),
        ("+backend.env.AWS_SECRET_ACCESS_KEY=x", "backend.env.AWS_SECRET_ACCESS_KEY: has the name of a secret"),
        ("+backend.env={A-B: 1}", "backend.env.A-B: is not a valid name of an environment variable"),
        ("backend.env.MALLOC_ARENA=1", "backend.env.MALLOC_ARENA: is not set by the backend\nhint: +backend.env."),
        ('backend.compiler_flags=["-O 1"]', "backend.compiler_flags[0]=-O 1: must be one word\nhint: write --name="),
        (
            "backend.compiler_flags=[--no_cache]",
            "backend.compiler_flags[0]=--no_cache: cluster.worker_cache_dir sets the cache",
        ),
        ("backend=torch_native backend.compiler_flags=[-O1]", "backend.compiler_flags=[-O1] and backend.name=torch_"),
        ("preflight.reserved_ports=[70000]", "preflight.reserved_ports[0]=70000: must be at least 1 and at most 65535"),
    ],
)
def test_what_can_not_be_asked_for_is_told(override: str, message: str) -> None:
    words = override.split() if override.startswith("backend=") else [override]
    with pytest.raises(ConfigError) as caught:
        nxd(*words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "installed", "problem"),
    [
        ("nxd", NXD, ""),
        ("torch_native", TORCH_NEURON, ""),
        ("nxd", {}, ""),
        ("nxd", TORCH_NEURON, "backend.name=nxd: torch-neuronx 2.14.3.0 is installed, which is TorchNeuron; NeuronX "),
        ("torch_native", NXD, "backend.name=torch_native: torch-neuronx 2.9.0.2.13.26312 is installed, which is for "),
        (
            "torch_native",
            {**TORCH_NEURON, "neuronx-distributed": "0.18"},
            "backend.name=torch_native: torch-neuronx 2.14.3.0 is installed beside neuronx-distributed 0.18: ",
        ),
        ("nxd", {**NXD, "torch": "2.13.0"}, "backend.name=nxd: torch-neuronx 2.9.0.2.13.26312 is installed beside "),
    ],
)
def test_the_two_stacks_of_one_name_are_not_mixed(name: str, installed: dict[str, str], problem: str) -> None:
    config = config_with(backend__name=name, backend__device="neuron")
    assert software_problem(config, installed)[: len(problem) or None] == problem
    assert software_problem(Config(), installed) == "", "other devices do not care"


#: What torchtitan needs beside itself.
NEEDS = dict.fromkeys(
    ("datasets", "einops", "pillow", "spmd_types", "tensorboard", "torch_checkpointing", "torchdata", "tyro"), "1.0"
)
TITAN_NEURON = {**TORCH_NEURON, "torchtitan": "0.2.2+neuron.1"}


@pytest.mark.parametrize(
    ("device", "installed", "python", "problem"),
    [
        ("cuda", {**NEEDS, "torchtitan": "0.3.1"}, (3, 11), ""),
        ("cuda", NEEDS, (3, 11), ": the package torchtitan is not installed"),
        ("cpu", {**NEEDS, "torchtitan": "0.2.2"}, (3, 11), ": torchtitan 0.2.2 is installed; 0.3.* works"),
        ("cpu", {**NEEDS, "torchtitan": "0.30.0"}, (3, 11), ": torchtitan 0.30.0 is installed; 0.3.* works"),
        (
            "cuda",
            {"torchtitan": "0.3.0"} | {name: "1.0" for name in NEEDS if name not in ("tyro", "torchdata")},
            (3, 11),
            ": torchtitan needs packages that are not installed: torchdata, tyro",
        ),
        ("neuron", TITAN_NEURON, (3, 12), ""),
        ("neuron", {**TORCH_NEURON, "torchtitan-neuron": "0.2.2+neuron.2"}, (3, 14), ""),
        (
            "neuron",
            {**TORCH_NEURON, "torchtitan": "0.3.0"},
            (3, 12),
            ": torchtitan 0.3.0 is installed; AWS's torchtitan-neuron 0.2.2+neuron.* works",
        ),
        ("neuron", {**TITAN_NEURON, "torch": "2.13.0"}, (3, 12), ": torch 2.13.0 is installed; 2.14.* works"),
        (
            "neuron",
            {**TITAN_NEURON, "torch-neuronx": "2.14.2.0"},
            (3, 12),
            ": torch-neuronx 2.14.2.0 is installed; 2.14.3.* works",
        ),
        (
            "neuron",
            {"torch": "2.14.0", "torchtitan": "0.2.2+neuron.1"},
            (3, 12),
            ": torch-neuronx is not installed; 2.14.3.* works",
        ),
        ("neuron", TITAN_NEURON, (3, 11), ": this is Python 3.11; Python 3.12 to 3.14 work"),
        ("neuron", TITAN_NEURON, (3, 15), ": this is Python 3.15; Python 3.12 to 3.14 work"),
    ],
)
def test_versions_that_torchtitan_does_not_work_with_are_named(
    device: str, installed: dict[str, str], python: tuple[int, int], problem: str
) -> None:
    found = torchtitan_problem(config_with(backend__name="torchtitan", backend__device=device), installed, python)
    assert found.removeprefix("backend.name=torchtitan").removeprefix(" with backend.device=neuron") == problem


def test_the_torchtitan_of_this_environment_works_on_cpus_and_lacks_neuron() -> None:
    check_torchtitan(config_with(backend__name="torchtitan"))
    with pytest.raises(DependencyError) as caught:
        check_torchtitan(config_with(backend__name="torchtitan", backend__device="neuron"))
    assert caught.value.hint.startswith("install Neuron SDK 2.33 and github.com/aws-neuron/torchtitan-neuron")


def test_graphs_are_keyed_by_what_the_compiler_reads() -> None:
    def key(*overrides: str) -> str:
        return graph_fingerprint(nxd(*overrides), {})

    same = [
        "backend.env.NEURON_RT_EXEC_TIMEOUT=1",
        "backend.env.MALLOC_ARENA_MAX=1",
        "optimizer.lr=1e-5",
        "seed=7",
        "train.tokens=1M",
    ]
    other = [
        "backend.env.NEURON_FUSE_SOFTMAX=0",
        "backend.compiler_flags=[-O1]",
        "optimizer.weight_decay=0.2",
        "cluster.processes_per_node=4",
        "precision=bf16_sr",
    ]
    assert {key(override) for override in same} == {key()}
    assert len({key(override) for override in other} | {key()}) == len(other) + 1


def test_a_gpu_s_graphs_need_a_c_compiler_and_python_s_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles the program that starts a kernel. Ubuntu's python3.12 has no headers without python3.12-dev."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_problem("cuda") == "no C compiler (gcc or clang or $CC) found"
    assert compiler_problem("neuron") == ""
    (tmp_path / "clang").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    problem = f"{tmp_path}/Python.h not found (apt-get install python{version}-dev)"
    assert compiler_problem("cuda") == problem
    (tmp_path / "Python.h").touch()
    assert compiler_problem("cuda") == ""
