"""Facts about the devices that a model trains on, one row per device.

Trainer, evaluator and flows read these facts. They compare a device's name for two questions only: whether it is the
CPU, and whether it needs Neuron's tools and software. Few modules name CUDA or its libraries
(``tests/trainer/test_devices.py`` lists them). Two things need no row. There is no autocast, because
``trainer.model.precision`` sets number formats explicitly. Synchronizing, counting and selecting devices use the
module of PyTorch for the device (``torch.get_device_module``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: The devices that PyTorch can compute on here, and the keys of ``DEVICES``.
DeviceName = Literal["cpu", "cuda", "neuron"]

#: Logits per block on devices where large products are faster: 1 GiB in FP32.
_LARGE_LOSS_BLOCK_ENTRIES = 1 << 28
#: 1 Mi FP32 entries are 4 MiB, which fit into a CPU's cache together with those of other processes.
_CACHED_LOSS_BLOCK_ENTRIES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device.

    Args:
        process_group: PyTorch's name of the communication backend.
        compile_backend: backend of torch.compile.
        cache_variable: environment variable with the folder of the compiler's cache.
        package: package to import first, so that PyTorch knows the device; none: PyTorch includes it.
        binds_groups: its process groups can be bound to a process's device (PyTorch's ``device_id``): they connect when
            they are created, and the library splits smaller groups from the first one. Groups of the hosts need
            ``gloo`` to have the device, too.
        forks: a process that has imported PyTorch for it can be forked (``trainer.launch``).
        own_for_each_process: each process of a node has a separate device; otherwise all share one.
        compiler: torch.compile needs a compiler of this language: Inductor for a CPU's kernels; Triton, with Python's
            headers, for programs that start a GPU's kernels.
        counts_graphs: the compiler reports how many graphs came from the cache (Inductor only).
        pins_host_memory: copies to the host are faster through pinned memory.
        fused_adamw: the device supports PyTorch's fused AdamW.
        rounds_stochastically: with ``conf.environment.STOCHASTIC_ROUNDING`` the device itself rounds to BF16
            stochastically; otherwise the optimizer does, with noise that it draws there.
        runs_behind_host: calls return before their work is done, and its module of PyTorch has events. Training then
            issues a step before it reads the metrics of the step before.
        captures_graphs: it can capture the work of a step once and replay it.
        memory: where the memory of a step is counted: by the device's module of PyTorch, by the host, or nowhere.
        profiled: PyTorch's profiler sees its kernels.
        variables: environment variables of its memory allocator, unless ``backend.env`` has them.
        hang_variables: environment variables with which its communication library keeps evidence of a collective that
            times out; ``{logs}`` is the folder of the attempt's logs.
        loss_block_entries: most logits that the loss computes per block: few enough for a CPU's cache, many on other
            devices, where large products are faster.
        fp8_capability: the lowest compute capability whose devices multiply in FP8; none: no such device does.
        fp8_architectures: AMD's architectures that do; their compute capabilities are on another scale.
        attention: the compute capability whose devices have a faster kernel of attention, PyTorch's name of it, and the
            package that has the kernel.
        resources: beginnings of the names by which Kubernetes counts such devices, from their device plug-ins.
        files: one of them exists where a driver has such a device, and then `hlatctl doctor` checks them.
        node_checks: module of the trainer whose ``look`` checks a node's devices before a preflight uses them; none:
            there is nothing to check.
        peak_flops_per_s: dense peak of matrix products by prefix of the device's name and number format, from the
            vendor's data sheets, without sparsity.
    """

    process_group: str
    compile_backend: str = "inductor"
    cache_variable: str = "TORCHINDUCTOR_CACHE_DIR"
    package: str | None = None
    binds_groups: bool = False
    forks: bool = False
    own_for_each_process: bool = True
    compiler: Literal["C++", "C", "none"] = "none"
    counts_graphs: bool = True
    pins_host_memory: bool = True
    fused_adamw: bool = True
    rounds_stochastically: bool = False
    runs_behind_host: bool = True
    captures_graphs: bool = False
    memory: Literal["device", "host", "unknown"] = "device"
    profiled: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    hang_variables: dict[str, str] = field(default_factory=dict)
    loss_block_entries: int = _LARGE_LOSS_BLOCK_ENTRIES
    fp8_capability: tuple[int, int] | None = None
    fp8_architectures: tuple[str, ...] = ()
    attention: tuple[tuple[int, int], str, str] | None = None
    resources: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    node_checks: str | None = None
    peak_flops_per_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def loss_rows(self, vocabulary: int) -> int:
        """Return the tokens whose logits are one block: a power of two, as other products leave tiles half empty."""
        return 1 << max(0, (self.loss_block_entries // vocabulary).bit_length() - 1)

    def peak(self, name: str, number_format: str) -> float | None:
        """Return the dense peak in FLOP/s of the device that calls itself ``name``; None if the table lacks it."""
        peaks = self.peak_flops_per_s.items()
        return next((peak for (known, dtype), peak in peaks if name.startswith(known) and dtype == number_format), None)


#: The backend between hosts for communication that must not wait for the device, such as writing checkpoints.
HOST_PROCESS_GROUP = "gloo"

#: Dense peaks in FP8, BF16 and FP32 by the name with which PyTorch knows a GPU, 10**12 FLOP/s; 0: no such format. The
#: first row that begins the name counts. NVIDIA's data sheets give most figures with sparsity; they are halved here.
#: They were compared in 2026-11 with copies of the tables of A100, L40S, H100 SXM and PCIe, H200 SXM, HGX B200 and
#: B300, GB200 and GB300 NVL72 (glennklockwood.com, mullet.se, fibermall.com, verda.com; no page of nvidia.com could be
#: read). Of GH200, H100 NVL and H200 NVL no copy was found; torchtitan 0.3 has the same BF16 figure of H100 NVL. AMD's
#: figures are those of its data sheets, and were computed again from compute units, clock and operations per clock: 220
#: units of 1.7 GHz (MI250X, whose two halves are two devices for PyTorch), 304 of 2.1 GHz (MI300X, MI325X), 256 of 2.2
#: and 2.4 GHz (MI350X, MI355X).
_GPU_TERA_FLOPS_PER_S = {
    "NVIDIA A100": (0, 312, 19.5),
    "NVIDIA L40S": (733, 362, 91.6),
    "NVIDIA H100 80GB HBM3": (1979, 989, 67),
    "NVIDIA H100 NVL": (1671, 835, 60),
    "NVIDIA H100 PCIe": (1513, 756, 51),
    "NVIDIA H200 NVL": (1671, 835, 60),
    "NVIDIA H200": (1979, 989, 67),
    "NVIDIA GH200": (1979, 989, 67),
    "NVIDIA B200": (4500, 2250, 75),
    "NVIDIA B300": (4500, 2250, 75),
    "NVIDIA GB200": (5000, 2500, 80),
    "NVIDIA GB300": (5000, 2500, 80),
    "AMD Instinct MI250X": (0, 191.5, 47.9),
    "AMD Instinct MI300X": (2615, 1307, 163.4),
    "AMD Instinct MI325X": (2615, 1307, 163.4),
    "AMD Instinct MI350X": (4614, 2307, 144.2),
    "AMD Instinct MI355X": (5033, 2517, 157.3),
}

#: By ``backend.device``.
DEVICES = {
    "cpu": Device(
        process_group=HOST_PROCESS_GROUP,
        forks=True,
        own_for_each_process=False,
        compiler="C++",
        pins_host_memory=False,
        runs_behind_host=False,
        memory="host",
        loss_block_entries=_CACHED_LOSS_BLOCK_ENTRIES,
    ),
    "cuda": Device(
        process_group="nccl",
        compiler="C",
        binds_groups=True,
        captures_graphs=True,
        # PyTorch's flight recorder (its tutorial "Flight Recorder for Debugging Stuck Jobs"; the recorder is on by
        # default). We have no such device to try it on.
        hang_variables={"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": "{logs}/nccl-rank-"},
        fp8_capability=(8, 9),
        fp8_architectures=("gfx942", "gfx950"),  # CDNA 3 and 4: MI300X, MI325X, MI350X, MI355X
        # torch/nn/attention/_fa3.py: "FA3 requires compute capability 9.0".
        attention=((9, 0), "FA3", "flash_attn_interface"),
        resources=("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu"),
        files=("/dev/nvidiactl", "/dev/kfd"),  # NVIDIA's driver, and AMD's
        node_checks="trainer.gpu_node",
        variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        peak_flops_per_s={
            (name, dtype): tera * 1e12
            for name, peaks in _GPU_TERA_FLOPS_PER_S.items()
            for dtype, tera in zip(("float8", "bfloat16", "float32"), peaks, strict=True)
            if tera
        },
    ),
    # TorchNeuron (Neuron SDK 2.33, torch-neuronx 2.14). The names of process group, compiler and variable are from its
    # documentation (awsdocs-neuron, "torch/"). Undocumented features are assumed to be missing. Its devices are logical
    # cores of two NeuronCores, four to a chip. Their names are from torchtitan 0.3.0's get_peak_flops, where AWS added
    # them. The peaks are those of "Trainium2 Architecture" and "Trainium3 Architecture" (2026-08): 667 and 671
    # TFLOP/s a chip in BF16, 181 and 183 in FP32. torchtitan counts the tensor engines alone, 158 TFLOP/s a device.
    "neuron": Device(
        process_group="neuron",
        compile_backend="neuron",
        cache_variable="TORCH_NEURONX_NEFF_CACHE_DIR",
        package="torch_neuronx",
        counts_graphs=False,
        pins_host_memory=False,
        fused_adamw=False,
        rounds_stochastically=True,  # AWS, "Neuron Rounding Modes"
        runs_behind_host=False,
        memory="unknown",
        profiled=False,
        resources=("aws.amazon.com/neuron",),
        node_checks="trainer.neuron.node",
        peak_flops_per_s={
            ("trn2", "bfloat16"): 166.75e12,
            ("trn2", "float32"): 45.25e12,
            ("trn3", "bfloat16"): 167.75e12,
            ("trn3", "float32"): 45.75e12,
        },
    ),
}
