"""One process of a training with torchtitan: its device, its place among the others, and what they exchange."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from conf.environment import compiler_problem
from conf.schema import Config
from hlatctl.run import peers
from hlatctl.run.errors import DependencyError
from trainer import rendezvous
from trainer.backends.base import DeviceStopwatch, HostStopwatch, Stopwatch, TorchDistributed
from trainer.backends.torch_native import own_device
from trainer.torchtitan import torch_2_13

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

#: DCP's collectives wait for the slowest process's storage; ``Together`` ends a write that takes too long.
_STORAGE_TIMEOUT = timedelta(days=1)


class Process(TorchDistributed):
    """What the manager's parts need of a process (``trainer.backends.base.Backend`` without the training itself)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compiles = config.backend.compile
        self.device = own_device(config.backend.device, int(os.environ.setdefault("LOCAL_RANK", "0")))
        if config.backend.device == "cpu":
            from trainer.torchtitan import cpu

            cpu.adapt()
        elif problem := compiler_problem(config.backend.device):  # FlexAttention is always compiled
            raise DependencyError(
                f"backend.name=torchtitan: {problem}", hint="install it on the nodes, or set backend=torch_native"
            )
        torch_2_13.add_timeouts()
        if not dist.is_initialized():
            self._join()
        # Threads that write checkpoints must not use the process groups of training, nor each other's.
        timeouts = rendezvous.TIMEOUT, rendezvous.TIMEOUT, _STORAGE_TIMEOUT
        self._beside, self.host_group, self.storage_group = rendezvous.host_groups(*timeouts)
        with peers.connecting(self._facts.process_group):
            self.dims = self._layout(config)
        rendezvous.set_timeout(rendezvous.timeout(config, None))
        batch = self.dims.get_optional_mesh("batch") if self.dims.dp_enabled else None
        self.data_parallel_size = config.data_parallel_size
        self.data_parallel_rank = batch.get_local_rank() if batch is not None else 0
        node = self.rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        places = self.gather([self.data_parallel_rank, node])
        replica = [rank for rank, place in enumerate(places) if place[0] == self.data_parallel_rank]
        self.is_replica_leader = replica[0] == self.rank
        #: Every process of a replica needs the tokens: for its inputs, its targets or the masks of documents.
        self.data_ranks = [rank for rank in replica if places[rank][1] == node]

    def _join(self) -> None:
        # Parts of torchtitan look up the current mesh in the threads of the backward pass (its init_distributed).
        torch.autograd.set_multithreading_enabled(False)
        if self.world_size > 1:
            rendezvous.join(self._facts.process_group, timeout=rendezvous.TIMEOUT)
        else:
            dist.init_process_group(self._facts.process_group, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def _layout(self, config: Config) -> ParallelDims:
        from torchtitan.config import ParallelismConfig
        from torchtitan.distributed import ParallelDims

        from trainer.torchtitan.configuration import parallelism

        dims = ParallelDims.from_config(ParallelismConfig(**parallelism(config)), self.world_size)
        dims.build_mesh()
        return dims

    @property
    def _exchange(self) -> tuple[torch.device, dist.ProcessGroup | None]:
        return torch.device("cpu"), self.host_group

    @property
    def place(self) -> tuple[int, int, int]:
        """See :class:`trainer.backends.base.Backend`; a slice is one of tensors, of sequences, and of experts."""
        stage, *others, shard = (self._in_mesh(axis) for axis in ("pp", "tp", "cp", "ep", "fsdp"))
        tensors, sequences, experts = others
        slice_ = tensors + self.dims.tp * (sequences + self.dims.cp * experts)
        return stage, slice_, shard

    @property
    def replica(self) -> int:
        """The number of the replica: processes that exchange tokens with each other's experts are in the same one."""
        processes = int(self.dims.cp * self.dims.tp)
        return self.data_parallel_rank * processes // max(int(self.dims.ep), processes)

    def _in_mesh(self, axis: str) -> int:
        mesh = self.dims.get_optional_mesh(axis)
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def steps_ahead(self) -> int:
        """Steps between an order and its effect: the processes agree during the next step."""
        return 1

    def stopwatch(self) -> Stopwatch:
        """See :class:`trainer.backends.base.Backend`."""
        return DeviceStopwatch(self.device) if self._facts.runs_behind_host else HostStopwatch(lambda: None)
