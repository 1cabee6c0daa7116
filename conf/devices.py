"""What differs between the devices that a model trains on, one row each: the only place that knows them by name.

Plain facts: trainer, evaluator and flows read them, and nobody asks for a device's name. Two things need no row. There
is no autocast: number formats are spelled out where they are used (``trainer.precision``). Waiting, counting and
choosing devices is done through the module that PyTorch has for each (``torch.get_device_module``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Logits at once where large products count and not the cache: 1 GiB in FP32.
LARGE_LOSS_BLOCK_ENTRIES = 1 << 28
#: 1 Mi FP32 entries are 4 MiB, which stay in a CPU's cache beside those of its neighbours.
_CACHED_LOSS_BLOCK_ENTRIES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device.

    Args:
        process_group: PyTorch's name of the backend that its processes talk through.
        compile_backend: torch.compile's.
        cache_variable: environment variable that names the folder of the compiler's cache.
        package: imported first, so that PyTorch knows the device; none: PyTorch brings it.
        own_for_each_process: every process of a node has one of its own; else they share what there is.
        compiles_with_cpp: its compiler needs a C++ compiler.
        counts_graphs: Inductor counts the graphs that came from the cache; other compilers have no such public count.
        pins_host_memory: copies to the host go faster through pinned memory.
        fused_adamw: it has PyTorch's fused AdamW.
        draws_noise: it has a random generator of its own; else noise is drawn on the CPU.
        loss_block_entries: logits that the loss makes at once: on a CPU they shall stay in the cache, elsewhere fewer
            and larger products are faster.
        peak_flops_per_s: dense peak of matrix products by the beginning of the device's name and the number format;
            vendor's data sheets, no sparsity.
    """

    process_group: str
    compile_backend: str = "inductor"
    cache_variable: str = "TORCHINDUCTOR_CACHE_DIR"
    package: str | None = None
    own_for_each_process: bool = True
    compiles_with_cpp: bool = False
    counts_graphs: bool = True
    pins_host_memory: bool = True
    fused_adamw: bool = True
    draws_noise: bool = True
    loss_block_entries: int = LARGE_LOSS_BLOCK_ENTRIES
    peak_flops_per_s: dict[tuple[str, str], float] = field(default_factory=dict)


#: Talks between hosts, for what must not wait for the device: checkpoints are written beside training.
HOST_PROCESS_GROUP = "gloo"

#: By ``backend.device``.
DEVICES = {
    "cpu": Device(
        process_group=HOST_PROCESS_GROUP,
        own_for_each_process=False,
        compiles_with_cpp=True,
        pins_host_memory=False,
        loss_block_entries=_CACHED_LOSS_BLOCK_ENTRIES,
    ),
    "cuda": Device(
        process_group="nccl",
        peak_flops_per_s={
            ("NVIDIA A100", "bfloat16"): 312e12,
            ("NVIDIA A100", "float32"): 19.5e12,
            ("NVIDIA H100 80GB HBM3", "bfloat16"): 989e12,
            ("NVIDIA H100 80GB HBM3", "float32"): 67e12,
            ("NVIDIA H200", "bfloat16"): 989e12,
            ("NVIDIA H200", "float32"): 67e12,
        },
    ),
    # TorchNeuron (Neuron SDK 2.33, torch-neuronx 2.14); names of process group, compiler and variable are from its
    # documentation (awsdocs-neuron, "torch/"). What that does not promise is taken not to be there; what it calls its
    # cores has not been seen, so no peak is known.
    "neuron": Device(
        process_group="neuron",
        compile_backend="neuron",
        cache_variable="TORCH_NEURONX_NEFF_CACHE_DIR",
        package="torch_neuronx",
        counts_graphs=False,
        pins_host_memory=False,
        fused_adamw=False,
        draws_noise=False,
    ),
}
