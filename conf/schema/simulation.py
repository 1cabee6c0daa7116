"""The simulated cluster of a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from conf.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

FailureKind = Literal[
    "hardware",
    "node",
    "process",
    "unfit",
    "collective_timeout",
    "hang",
    "straggler",
    "flip_memory",
    "upgrade",
    "disk_full",
    "nan",
    "head_crash",
    "mlflow_outage",
]
#: Kinds whose rates are those of the whole cluster: there is one scheduler, storage, model and driver, whatever the
#: number of nodes.
OF_CLUSTER: tuple[FailureKind, ...] = ("upgrade", "disk_full", "nan", "head_crash", "mlflow_outage")


@dataclass(frozen=True, kw_only=True)
class FailureRatesConfig:
    """Failure rates of a simulated cluster: of a node per 1,000 node-hours, of the whole cluster per 1,000 hours.

    HLAT names the kinds of failures but not their rates. Our rates together give the paper's uptime of 77.83 % without
    automatic restarts on 64 nodes (arXiv 2404.10630, Table 1), for a run that waits for a person after every failure
    (`recovery.enabled=false`, `simulation.person_s`). How the kinds share it is a guess.
    """

    hardware: NonNegativeFloat = 0.35
    """A device fails: its process dies and names it, and the host can't train until it is repaired."""
    node: NonNegativeFloat = 0.0
    """A node is cut off: it loses its power, its kernel or its network. No job gets it until it is repaired."""
    process: NonNegativeFloat = 0.0
    """A process dies through a fault of software; its host is fit."""
    unfit: NonNegativeFloat = 0.03
    """A host degrades silently; the next preflight rejects it."""
    collective_timeout: NonNegativeFloat = 0.17
    """Processes wait for each other until the collective times out."""
    hang: NonNegativeFloat = 0.09
    """The same without a timeout."""
    straggler: NonNegativeFloat = 0.06
    """A host is slow for a while."""
    flip_memory: NonNegativeFloat = 0.0
    """A host computes wrong numbers without an error; only a check (`recovery.corruption_check_steps`) finds it."""
    upgrade: NonNegativeFloat = 4.6
    """The cluster is upgraded: the job is asked to stop, and no node is available for a while; per 1,000 hours."""
    disk_full: NonNegativeFloat = 2.6
    """The shared storage is full until a person frees space; per 1,000 hours."""
    nan: NonNegativeFloat = 2.6
    """Loss and gradients of a step are not finite; per 1,000 hours."""
    head_crash: NonNegativeFloat = 3.0
    """The driver dies; per 1,000 hours."""
    mlflow_outage: NonNegativeFloat = 3.0
    """MLflow does not answer for a while; per 1,000 hours."""


@dataclass(frozen=True, kw_only=True)
class PastFailure:
    """A failure that has happened."""

    after_s: NonNegativeFloat
    """Time from the start of the first training job."""
    kind: FailureKind
    """A kind of `simulation.failures`."""
    node: NonNegativeInt = 0
    """Place of its host among those of the training job, from 0; numbers after the last one begin again. Without effect
    for kinds without a host."""


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """The simulated cluster of a dry run or a forecast, given as `simulation.*`; not part of a run's configuration."""

    seed: NonNegativeInt = 1
    """Seed of all random draws; the same seed gives the same simulated run."""
    step_s: PositiveFloat | None = None
    """Time of an optimizer step; none: as predicted by `hlatctl plan`."""
    data_wait_s: NonNegativeFloat = 0.0
    """The part of `step_s` in which a step waits for data."""
    between_steps_s: NonNegativeFloat = 0.0
    """Time between two steps in which neither computes, such as for the journal."""
    step_events: PositiveInt | None = 1000
    """Step events in a whole run's journal, at least those at checkpoints and ends of attempts; none: every step."""
    shows_recovery: bool = True
    """Kill a process in the middle of the first attempt, so that a short simulation shows a restart too."""
    failures: FailureRatesConfig = field(default_factory=FailureRatesConfig)
    history: list[PastFailure] = field(default_factory=list)
    """Failures to simulate instead of random ones: `[{after_s: 600, kind: hang, node: 1}]`."""
    spare_nodes: NonNegativeInt = 2
    """Spare hosts, unless `cluster.spare_nodes` names them; a cluster of one node has none by default."""
    repair_s: NonNegativeFloat = 14_400.0
    """Mean time until a failed host is repaired or replaced."""
    person_s: NonNegativeFloat = 21_600.0
    """Mean time until a person fixes a problem and resumes the run."""
    head_restart_s: NonNegativeFloat = 300.0
    """Time until a dead driver is started again."""
    detect_s: NonNegativeFloat = 5.0
    """Time from the end of a process until the driver knows that the attempt has ended."""
    node_detect_s: NonNegativeFloat = 10.0
    """Time from the loss of a node until the driver knows that the attempt has ended (decision 120)."""
    leave_s: NonNegativeFloat = 5.0
    """The same after an attempt that ends by itself or was asked to stop, from its last event."""
    end_hung_s: NonNegativeFloat = 5.0
    """Time to end an attempt that hangs, with the evidence that its processes leave."""
    decide_s: NonNegativeFloat = 0.0
    """Time until the driver has decided what follows."""
    place_s: NonNegativeFloat = 0.0
    """Time until the next attempt is placed and submitted, in addition to checks of nodes and delays."""
    start_s: NonNegativeFloat = 240.0
    """Time from a training job's submission until its processes load the checkpoint."""
    warm_start_s: NonNegativeFloat | None = None
    """The same if processes of the previous job have stayed, with all imports (decision 110). None: `start_s`."""
    groups_s: NonNegativeFloat | None = None
    """The part of `start_s` in which the processes meet. None: computed from their number."""
    load_s: NonNegativeFloat | None = None
    """Time to make the model and load a checkpoint. None: the checkpoint's bytes at `storage_bytes_per_s`."""
    first_step_s: PositiveFloat | None = None
    """Time of an attempt's first step, which may load compiled graphs. None: that of any step."""
    time_limit_s: PositiveFloat | None = None
    """Time after which a training job is asked to stop; the next one continues. None: no limit. A forecast takes it
    from `cluster.slurm` and the partition."""
    maintenance_after_s: NonNegativeFloat | None = None
    """Time from the run's creation to a planned maintenance: the job is asked to stop, and no node is available
    during it. None: no maintenance. A forecast takes it from Slurm's reservations."""
    maintenance_s: PositiveFloat = 28_800.0
    """Duration of the planned maintenance."""
    storage_bytes_per_s: PositiveFloat = 5e9
    """Bandwidth of the shared storage, for all nodes together."""
    host_copy_bytes_per_s: PositiveFloat = 10e9
    """Bandwidth from a node's devices to its memory; a checkpoint stalls training for this copy."""
    prepare_data_s: NonNegativeFloat = 3600.0
    """Time to prepare the corpus."""
    compile_s: NonNegativeFloat = 1800.0
    """Time to compile the graphs."""
    warm_cache_s: NonNegativeFloat = 120.0
    """Time to copy the compiled graphs to all nodes."""
    preflight_s: NonNegativeFloat = 60.0
    """Time of one preflight."""
    evaluation_s: NonNegativeFloat = 7200.0
    """Time to evaluate one milestone."""
    upgrade_s: NonNegativeFloat = 1800.0
    """How long no node is available."""
    collective_timeout_s: NonNegativeFloat = 300.0
    """Time until a collective gives up waiting."""
    straggler_s: NonNegativeFloat = 7200.0
    """How long a slow host stays slow."""
    straggler_factor: PositiveFloat = 1.6
    """A slow host makes every step take this many times as long."""
    mlflow_outage_s: NonNegativeFloat = 3600.0
    """How long MLflow does not answer."""
