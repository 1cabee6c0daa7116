"""The cluster: its nodes and devices, what its scheduler is asked for, and the requirements of its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from conf.constraints import Efficiency, Fraction, NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt
from conf.registries import LAUNCHERS, JobsRun


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One process's device, as the planner models it; none: unknown, and reported as unknown."""

    bf16_flops_per_s: PositiveFloat | None = None
    """Published dense peak of matrix products in BF16."""
    fp32_flops_per_s: PositiveFloat | None = None
    """The same in FP32."""
    fp8_flops_per_s: PositiveFloat | None = None
    """The same in FP8; none: the device has no such products, or their speed is unknown."""
    memory_bytes: PositiveInt | None = None
    """Memory of the device; a run that needs more is refused."""
    memory_bytes_per_s: PositiveFloat | None = None
    """Bandwidth of that memory."""
    node_memory_bytes: PositiveInt | None = None
    """Host memory of a node; copies in memory that need more than half of it are refused. None: unknown."""
    link_bytes_per_s: PositiveFloat | None = None
    """Bandwidth from one process to the others of its node."""
    network_bytes_per_s: PositiveFloat | None = None
    """Bandwidth from one node to the others."""
    link_latency_s: NonNegativeFloat = 0.0
    """Time of a collective's step between two processes of a node, apart from its bytes; 0: unknown."""
    network_latency_s: NonNegativeFloat = 0.0
    """The same between two nodes."""
    speed_deviation_fraction: Fraction = 0.0
    """Standard deviation of the speed of devices of this kind, relative to their mean: a step takes as long as on the
    slowest one. 0: unknown."""
    compute_efficiency: Efficiency = 1.0
    """Share of the peak that large matrix products reach, apart from the time to move their operands; calibrated."""
    collective_efficiency: Efficiency = 1.0
    """Share of a link's bandwidth that collectives reach; calibrated."""
    pipeline_overhead_s: NonNegativeFloat = 0.0
    """Overhead of a micro-batch on each pipeline stage, such as starting graphs; calibrated."""
    tensor_parallel_sizes: list[PositiveInt] = field(default_factory=list)
    """Group sizes within a node that its collectives support; a search tries only these. Empty: any."""
    workspace_bytes: NonNegativeInt = 0
    """Device memory that runtime, compiler and allocator take besides the model; calibrated."""


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Other hardware to compare a plan's cost with; none: no comparison."""

    name: str | None = None
    """Hardware to compare the cost with."""
    price_usd_per_node_hour: PositiveFloat | None = None
    """Price of one of its nodes."""
    flops_per_s_per_node: PositiveFloat | None = None
    """Dense peak of all devices of a node, in BF16."""
    mfu_fraction: Efficiency | None = None
    """Model FLOPs utilization of training on that hardware."""


@dataclass(frozen=True, kw_only=True)
class SlurmDriverConfig:
    """The Slurm job of a run's driver, with `--driver slurm`: no devices, and replaced before its time limit."""

    partition: str | None = None
    """Partition of the driver's job, such as one for small jobs of long duration; none: that of the other jobs."""
    qos: str | None = None
    """Its quality of service; none: that of the other jobs, unless the partition is another one."""
    time_limit_s: PositiveInt = 86_400
    """Wall time of one driver's job, or the partition's limit if that is shorter; the next job continues."""
    cpus: PositiveInt = 2
    """CPUs of the job."""
    memory_gib: PositiveInt | None = 4
    """Memory of the job; none: the cluster's default."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch for this job alone, such as `--constraint=cpu`."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `cluster.launcher=slurm` asks of sbatch (Slurm's manual, sbatch(1))."""

    partition: str | None = None
    """Partition of the jobs; none: the cluster's default."""
    account: str | None = None
    """Account that the jobs are charged to; none: the user's default."""
    qos: str | None = None
    """Quality of service of the jobs; none: the account's default."""
    reservation: str | None = None
    """Reservation whose nodes the jobs use; none: any free nodes."""
    constraint: str | None = None
    """Features that each node must have, in sbatch's syntax, such as `gpu` or `a100&hbm80g`; none: any node."""
    gpus_per_node: PositiveInt | None = None
    """GPUs of each training node; an evaluation asks for its share. None: sbatch is not asked for GPUs."""
    modules: list[str] = field(default_factory=list)
    """Environment modules that each job loads, in this order, such as `CUDA/12.9`."""
    setup_script: str | None = None
    """Shell script that each job sources after loading the modules, to set variables of its environment."""
    time_limit_s: PositiveInt | None = None
    """Wall time of one job; a run that needs longer continues in the next job. None: the partition's default, or else
    its limit."""
    stop_before_limit_s: PositiveInt = 300
    """Before the time limit, the trainer is asked this early to save a checkpoint and to end."""
    idle_release_s: PositiveInt = 600
    """Nodes that are kept for training are given back after this time without a job, such as without a driver."""
    exclusive: bool = True
    """Training shares its nodes with no other job."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as `--mem=0`, for training and preflight."""
    driver: SlurmDriverConfig = field(default_factory=SlurmDriverConfig)

    @property
    def device_options(self) -> list[str]:
        """All options of sbatch for nodes of training, the GPUs included."""
        return [*([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []), *self.extra]

    @property
    def selection(self) -> dict[str, str]:
        """Options of sbatch that select nodes and who pays, by the name that they share with their key."""
        names = ("partition", "account", "qos", "reservation", "constraint")
        return {name: value for name in names if (value := getattr(self, name))}


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """The container in which a Slurm cluster runs jobs; without an image, they run in this hlatctl's environment."""

    image: str | None = None
    """Of pyxis (`registry#image:tag` or a squashfs file) or Apptainer; contains hlatctl in the driver's version."""
    mounts: list[str] = field(default_factory=list)
    """Folders of the node to mount, as `FROM:TO` or `FROM:TO:ro`; the runs folder always is."""
    runtime: Literal["pyxis", "apptainer", "singularity"] = "pyxis"
    """`pyxis` (options of srun), `apptainer`, or `singularity`, where Apptainer has that name."""
    python: str = "python3"
    """Python inside the image."""
    options: list[str] = field(default_factory=list)
    """Further options, such as `--nv` of `apptainer exec`; for pyxis, of srun."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """What `cluster.launcher=kubernetes` asks of a cluster: a job is an Indexed Job of batch/v1, a pod a node."""

    context: str | None = None
    """Of the kubeconfig; none: kubectl's current one, or the service account of the driver's own pod."""
    namespace: str | None = None
    """None: the context's."""
    image: str | None = None
    """Of all pods, with hlatctl in the driver's version. Name it by digest, so that all attempts run the same."""
    python: str = "python3"
    """Python inside the image."""
    claims: dict[str, str] = field(default_factory=dict)
    """Volume claims to mount, as `NAME: /PATH`. One must hold `runs_dir`, at the same path as for the driver."""
    cache_host_path: str | None = None
    """Folder of a node's own disk that is mounted at `cluster.worker_cache_dir`; none: it is lost with each pod."""
    resources: dict[str, str] = field(default_factory=dict)
    """Limits of a pod on which training's processes run, such as `nvidia.com/gpu: "8"`."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which counts as the pod's memory."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: list[str] = field(default_factory=list)
    """Keys of taints that pods tolerate, such as `nvidia.com/gpu`."""
    queue: str | None = None
    """Local queue of Kueue that admits the jobs."""
    priority_class: str | None = None
    """Priority class of the pods; none: the cluster's default."""
    service_account: str | None = None
    """Service account of the pods; none: the namespace's default. They need no rights."""
    pull_secret: str | None = None
    """Secret with the credentials of the image's registry."""
    grace_s: PositiveInt = 300
    """Time from the request to stop to the end of a pod, for a last checkpoint."""
    lost_after_s: PositiveInt = 60
    """A node that has been unreachable for so long has failed."""
    keep_ended_s: PositiveInt = 604_800
    """Ended jobs are removed from the cluster after this time; the run's own files stay."""
    patch: dict[str, Any] = field(default_factory=dict)
    """Strategic merge patch of each Job, for everything else."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where jobs run."""

    name: str = "local"
    """Label of the cluster; `hlatctl plan` shows the published runs that were planned with it."""
    launcher: Annotated[str, LAUNCHERS] = "local"
    """What starts the jobs. --dry-run selects `simulated`."""
    nodes: PositiveInt = 1
    """Nodes that train."""
    processes_per_node: PositiveInt = 1
    """Training processes on each node, usually one per device."""
    threads_per_process: PositiveInt = 1
    """CPU threads of each process's computation."""
    spare_nodes: NonNegativeInt = 0
    """Further nodes of a Slurm allocation, if they are free: they replace failed ones without a wait in the queue."""
    interface: str | None = None
    """Network interface that processes on several nodes talk through, such as `eth0`; None: the libraries choose."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    worker_cache_dir: str = "~/.cache/hlatctl"
    """Folder on each worker's own disk for compiled graphs, and for its copy of the environment."""
    stage_environment: bool = False
    """Slurm: unpack the Python environment on each worker's own disk, instead of importing it from shared storage."""
    metadata_url: str | None = None
    """Address of EC2's instance metadata service, `http://169.254.169.254`. Each training node asks it whether its Spot
    instance will be interrupted, and training saves a checkpoint before that. None: the nodes don't ask."""
    capacity_ends: str | None = None
    """End of bought capacity, such as a Capacity Block: `2026-12-01T11:30Z`. Training stops with a checkpoint 35 min
    before, and continues on later capacity. None: no end."""
    price_usd_per_node_hour: NonNegativeFloat | None = None
    """Price of a node, for costs; none: costs are not shown."""
    confirm_above_usd: NonNegativeFloat = 100.0
    """Ask before a submission that is predicted to cost more; without a terminal, refuse it unless `--yes` is given."""
    confirm_above_node_hours: NonNegativeFloat = 100.0
    """The same limit in node-hours, which needs no price."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)

    @property
    def capacity_ends_unix_s(self) -> float | None:
        """The end of bought capacity as a Unix time.

        Raises:
            ValueError: it is not an ISO 8601 time with a time zone.
        """
        if self.capacity_ends is None:
            return None
        at = datetime.fromisoformat(self.capacity_ends)
        if at.tzinfo is None:
            raise ValueError("it has no time zone")
        return at.timestamp()

    @property
    def jobs_run(self) -> JobsRun:
        """Where the launcher's jobs run."""
        return LAUNCHERS[self.launcher].jobs_run

    @property
    def paid_nodes(self) -> int:
        """Nodes that a run holds and pays for, if all spare ones are free when it starts."""
        return self.nodes + self.spare_nodes


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """What a run may use over all of its attempts; at the limit it stops with a checkpoint."""

    usd: PositiveFloat | None = None
    """Dollars, counted with `cluster.price_usd_per_node_hour`. None: no limit."""
    node_hours: PositiveFloat | None = None
    """Node-hours, with kept and spare nodes. None: no limit."""

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self.usd is not None or self.node_hours is not None


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Requirements that every worker must meet before training starts."""

    min_matmul_gflops_per_s: NonNegativeFloat = 1.0
    """Timed FP32 matrix product, per process."""
    min_allreduce_mib_per_s: NonNegativeFloat = 1.0
    """Timed all-reduce of 16 MiB over all processes."""
    max_clock_skew_s: NonNegativeFloat = 2.0
    """Difference between a worker's clock and rank 0's."""
    min_open_files: NonNegativeInt = 1024
    """Open files of a process. Processes of jobs raise their soft limit to the hard one."""
    reserved_ports: list[Port] = field(default_factory=list)
    """Ports that the kernel must not give to other connections (net.ipv4.ip_local_reserved_ports)."""
    min_somaxconn: NonNegativeInt = 0
    """Connections that may wait to be accepted (net.core.somaxconn)."""
    min_efa_devices: NonNegativeInt = 0
    """Elastic Fabric Adapters on each node."""
    min_nccom_gib_per_s: NonNegativeFloat | None = None
    """Bus bandwidth of `nccom-test`'s all-reduce over the NeuronCores of a node; none: not run."""
    min_nccom_nodes_gib_per_s: NonNegativeFloat | None = None
    """The same over all nodes of a Slurm job; none: not run."""
    min_gpu_tflops_per_s: NonNegativeFloat = 0.0
    """Timed BF16 matrix product of each GPU, while all GPUs compute."""
    min_gpu_node_gib_per_s: NonNegativeFloat = 0.0
    """Timed exchange of 256 MiB by each GPU with its two neighbours in the node, all at once."""
    min_gpu_nodes_gib_per_s: NonNegativeFloat = 0.0
    """The same with the GPUs of the same number in the two neighbouring nodes."""
    min_median_fraction: Fraction = 0.8
    """Share of the job's median that each of these three must reach; 0: not compared."""
    dcgm_level: NonNegativeInt = 0
    """Level of `dcgmi diag` on each node's NVIDIA GPUs, if DCGM is installed; 0: not run. Level 1 takes seconds."""
    timeout_s: PositiveFloat = 120.0
    """Longest time of the whole preflight."""
