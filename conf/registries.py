"""The launchers, backends, optimizers and schedules, with the capabilities that others decide by.

No other module compares these names. Another installed package adds rows by entry points (``hlatctl.run.registry``;
docs/architecture.md, "How to add"). Text fields ``package.module:attribute`` are imported when they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hlatctl.run.registry import Registry, Row

JobsRun = Literal["here", "cluster", "nowhere"]


@dataclass(frozen=True, kw_only=True)
class LauncherKind(Row):
    """A launcher: ``code(config)`` returns a ``flows.launch.base.Launcher``.

    Args:
        jobs_run: ``here``: on this machine alone, in its environment; ``cluster``: on nodes that a scheduler chooses;
            ``nowhere``: they are simulated.
        rules: ``rules(config)`` yields an error for each rule of its settings that a configuration breaks.
        start_rules: the same for settings that only a start needs; a plan reports them.
        settings: group of keys that only this launcher reads, such as ``cluster.slurm.``.
        simulation: ``simulation(run, config)`` returns the cluster (``flows.runtime.context.Simulation``) of such jobs.
        copies_graphs: each job may get nodes without the graphs that were compiled before, and copies them there.
        keeps_memory: what a node has in /dev/shm is still there in the next attempt that runs on it.
        check: ``check(config)`` yields the checks of the cluster for `hlatctl doctor --cluster`.
        drill: ``drill(config)`` returns a ``flows.drill.arena.Reach``; empty: jobs can't be disturbed on purpose.
        drivers: ``drivers()`` returns a ``flows.launch.base.Drivers``; empty: a driver can't be a job.
        script: what the text of a job is called.
        device_hint: how a job of an evaluation asks for a device.
    """

    jobs_run: JobsRun = "cluster"
    rules: str = ""
    start_rules: str = ""
    settings: str = ""
    simulation: str = ""
    copies_graphs: bool = False
    keeps_memory: bool = False
    check: str = ""
    drill: str = ""
    drivers: str = ""
    script: str = "launch script"
    device_hint: str = ""


#: By ``cluster.launcher``.
LAUNCHERS = Registry(
    "cluster.launcher",
    "hlatctl.launchers",
    LauncherKind,
    {
        "local": LauncherKind(
            code="flows.launch.local:LocalLauncher.of",
            jobs_run="here",
            keeps_memory=True,
            drill="flows.drill.arena:Here",
        ),
        "slurm": LauncherKind(
            code="flows.launch.slurm.launcher:SlurmLauncher.of",
            settings="cluster.slurm.",
            copies_graphs=True,
            keeps_memory=True,
            check="flows.cluster_checks:check_cluster",
            drill="flows.drill.arena:OnSlurm",
            drivers="flows.launch.slurm.drivers:SlurmDrivers",
            device_hint="if its job has no device, ask for one with eval.cluster.extra=['--gpus-per-node=1']",
        ),
        "kubernetes": LauncherKind(
            code="flows.launch.kubernetes.launcher:KubernetesLauncher.of",
            rules="conf.cluster_rules:of_kubernetes",
            start_rules="conf.cluster_rules:to_start_on_kubernetes",
            settings="cluster.kubernetes.",
            check="flows.cluster_checks:check_kubernetes",
            script="manifest",
            device_hint="if its pod has no device, ask for one with eval.cluster.resources",
        ),
        "simulated": LauncherKind(
            code="flows.simulation.cluster:SimulatedLauncher",
            jobs_run="nowhere",
            keeps_memory=True,
            simulation="flows.simulation.jobs:simulated_cluster",
            check="flows.cluster_checks:check_cluster",
        ),
    },
)


#: What a backend can do, and how it works:
#: ``context_parallel``, ``fsdp``, ``fp8``: it has parallel.context_parallel_size, data_parallel=fsdp, precision=fp8.
#: ``fsdp_size``: hybrid sharding. ``interleaves``: pipeline_schedule=interleaved_1f1b.
#: ``recomputes_operators``: activation_checkpointing=operators and budget.
#: ``masks_in_stages``: all pipeline stages see where documents end.
#: ``shards_stages``: it shards the weights or moments of pipeline stages.
#: ``copies_kv_heads``: tensor parallelism over more processes than key/value heads.
#: ``shards_weights``: ZeRO-1 shards weights too.
#: ``fused_attention``: scores are never in memory.
#: ``keeps_inputs``: sequence parallelism gathers the input of a product once, for both passes.
#: ``blocks_of_loss``: logits are computed in blocks.
#: ``overlaps_gradients``: gradients are summed during the backward pass.
#: ``sums_copies_once``: hybrid sharding sums gradients over the copies of the shards in the last micro-batch only.
#: ``compiles_ahead``: graphs are compiled before training, and the cache can be checked for them.
#: ``experts``: mixtures of experts and latent attention; it takes ``model.module``.
Trait = Literal[
    "context_parallel",
    "fp8",
    "fsdp_size",
    "recomputes_operators",
    "interleaves",
    "masks_in_stages",
    "shards_stages",
    "copies_kv_heads",
    "shards_weights",
    "fused_attention",
    "keeps_inputs",
    "blocks_of_loss",
    "overlaps_gradients",
    "sums_copies_once",
    "compiles_ahead",
    "experts",
]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter, by purpose.

    Args:
        gradients: the buffer in which micro-batches are accumulated.
        moment: one moment; ``OptimizerKind`` has their number.
        master: FP32 weights in addition to BF16 ones.
    """

    weights: int
    gradients: int
    moment: int
    master: int = 0


_FULL = StateBytes(weights=4, gradients=4, moment=4)
_TORCH_BF16 = StateBytes(weights=2, gradients=4, moment=2)
_TITAN_BF16 = StateBytes(weights=2, gradients=2, moment=2)
_NXD_BF16 = StateBytes(weights=2, gradients=2, moment=2)


#: Keys that only some backends read.
_OF_NATIVE = ("optimizer.ema_decay", "checkpoint.memory_every_steps")
_OF_TORCHTITAN = ("parallel.expert_parallel_size", "backend.torchtitan")


@dataclass(frozen=True, kw_only=True)
class BackendKind(Row):
    """A backend: ``code(config)`` returns a ``trainer.backends.base.Backend``.

    Args:
        training: an engine with a loop of its own: ``training(config, run, backend, journal, *, attempt,
            max_checkpoint_step)`` returns an object whose ``run()`` trains and returns the process's exit code.
            ``code`` then needs only what processes exchange (``trainer.backends.base.TorchDistributed``).
        state_bytes: by ``precision.name``; without a row, the backend does not train in this precision.
        traits: what it can do and how it works.
        devices: values of ``backend.device`` that it trains on; empty: all.
        torch_xla: it runs on torch-xla, which compiles the whole step as one graph. The device is then unknown to
            PyTorch's profiler and to other software, such as transformers.
        optimizers: names of the optimizers that it has itself; empty: it takes those of the registry.
        data_parallel: values of ``parallel.data_parallel`` that it trains with, from the least sharded.
        ignores: keys that it doesn't read; they must have their defaults.
        package: distribution that it needs on Trainium nodes.
        own_settings: module with ``settings(config)``, which checks a configuration and returns the engine's own one.
            ``python -m MODULE --config FILE`` prints it as JSON.
        counts: ``counts(config)`` returns the configuration with the counts and the shape of the model of
            ``model.module``, which this backend can ask another package for.
        software: ``software(config)`` raises a DependencyError if the environment of this process can't train.
        rules: ``rules(config)`` yields an error for each of its other rules that a configuration breaks.
        before_fork: function for CPUs that imports what its processes share, before they are forked.
        checkpoint_format: format of its checkpoints, a key of ``hlatctl.run.checkpoint.INDEX_FILES``.
    """

    state_bytes: dict[str, StateBytes]
    training: str = "trainer.step.loop:Training"
    before_fork: str = ""
    checkpoint_format: str = "native"
    traits: frozenset[Trait] = frozenset()
    devices: tuple[str, ...] = ()
    torch_xla: bool = False
    optimizers: tuple[str, ...] = ()
    data_parallel: tuple[str, ...] = ("replicate", "zero1", "fsdp")
    ignores: tuple[str, ...] = (*_OF_TORCHTITAN, *_OF_NATIVE, "model.mup_base_width", "recovery.corruption_check_steps")
    package: str = ""
    own_settings: str = ""
    counts: str = ""
    software: str = ""
    rules: str = ""


#: By ``backend.name``.
BACKENDS = Registry(
    "backend.name",
    "hlatctl.backends",
    BackendKind,
    {
        "torch_native": BackendKind(
            code="trainer.backends.torch_native:TorchNative",
            state_bytes={"fp32": _FULL, "mixed": _FULL, "bf16_sr": _TORCH_BF16, "bf16": _TORCH_BF16},
            traits=frozenset(
                {
                    "fsdp_size",
                    "masks_in_stages",
                    "shards_weights",
                    "fused_attention",
                    "keeps_inputs",
                    "blocks_of_loss",
                    "overlaps_gradients",
                    "sums_copies_once",
                    "compiles_ahead",
                }
            ),
            ignores=_OF_TORCHTITAN,
        ),
        "torchtitan": BackendKind(
            code="trainer.torchtitan.process:Process",
            training="trainer.torchtitan.training:Training",
            before_fork="trainer.torchtitan.cpu:adapt",
            checkpoint_format="dcp",
            state_bytes={"fp32": _FULL, "mixed": _FULL, "fp8": _FULL, "bf16": _TITAN_BF16},
            traits=frozenset(
                {
                    "context_parallel",
                    "fp8",
                    "fsdp_size",
                    "recomputes_operators",
                    "interleaves",
                    "masks_in_stages",
                    "shards_stages",
                    "shards_weights",
                    "fused_attention",
                    "keeps_inputs",
                    "blocks_of_loss",
                    "overlaps_gradients",
                    "experts",
                }
            ),
            own_settings="trainer.torchtitan.check",
            counts="flows.runtime.model_counts:counted",
            software="conf.environment:check_torchtitan",
            optimizers=("adamw",),
            data_parallel=("replicate", "fsdp"),
            ignores=_OF_NATIVE,
            rules="conf.layouts:of_torchtitan",
        ),
        "nxd": BackendKind(
            code="trainer.backends.nxd:Nxd",
            # With mixed precision NxD keeps BF16 weights and FP32 masters, and accumulates micro-batches in FP32 (HLAT
            # 70B's published script); torch_native keeps FP32 weights.
            state_bytes={
                "fp32": _FULL,
                "mixed": StateBytes(weights=2, gradients=4, moment=4, master=4),
                "bf16_sr": _NXD_BF16,
                "bf16": _NXD_BF16,
            },
            traits=frozenset({"shards_stages", "copies_kv_heads", "compiles_ahead"}),
            devices=("neuron", "cpu"),
            torch_xla=True,
            optimizers=("adamw",),
            data_parallel=("replicate", "zero1"),
            package="neuronx-distributed",
            rules="conf.layouts:of_nxd",
        ),
    },
)


@dataclass(frozen=True, kw_only=True)
class OptimizerKind(Row):
    """An optimizer: ``code(shards, config, **options)`` returns a ``trainer.optim.adamw.AdamW`` or a class of it.

    Args:
        moments: tensors that it keeps in addition to each weight.
        matrix_moments: the same for the matrices of layers.
        orthogonalizes: it orthogonalizes the update of each matrix of layers, in
            ``optimizer.newton_schulz_steps`` iterations.
        settings: keys of ``optimizer`` that only such optimizers read.
    """

    moments: int = 2
    matrix_moments: int = 2
    orthogonalizes: bool = False
    settings: tuple[str, ...] = ()


#: By ``optimizer.name``.
OPTIMIZERS = Registry(
    "optimizer.name",
    "hlatctl.optimizers",
    OptimizerKind,
    {
        "adamw": OptimizerKind(code="trainer.optim.adamw:AdamW.of"),
        "muon": OptimizerKind(
            code="trainer.optim.muon:Muon.of",
            matrix_moments=1,
            orthogonalizes=True,
            settings=("momentum", "nesterov", "newton_schulz_steps"),
        ),
    },
)


@dataclass(frozen=True, kw_only=True)
class ScheduleKind(Row):
    """A schedule: ``code(step, config)`` returns a learning rate after the warm-up, from 1 (peak) to 0 (final).

    Args:
        settings: keys of ``optimizer`` that only this schedule reads.
    """

    settings: tuple[str, ...] = ()


#: By ``optimizer.schedule``.
SCHEDULES = Registry(
    "optimizer.schedule",
    "hlatctl.schedules",
    ScheduleKind,
    {
        "cosine": ScheduleKind(code="conf.training_rules:cosine"),
        "linear": ScheduleKind(code="conf.training_rules:linear"),
        "wsd": ScheduleKind(code="conf.training_rules:wsd", settings=("wsd_decay_fraction",)),
    },
)
