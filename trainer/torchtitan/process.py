"""One process of a training with torchtitan: its device, its place among the others, and what they exchange."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from conf.devices import DEVICES
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
        self.facts = DEVICES[config.backend.device]
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
        with peers.connecting(self.facts.process_group):
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
            rendezvous.join(self.facts.process_group, timeout=rendezvous.TIMEOUT)
        else:
            dist.init_process_group(self.facts.process_group, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

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

    def reduce_sum(self, tensor: Tensor) -> None:
        """See :class:`trainer.backends.base.Backend`."""
        dist.all_reduce(tensor)

    @property
    def steps_ahead(self) -> int:
        """Steps between an order and its effect: the processes agree during the next step."""
        return 1

    def stopwatch(self) -> Stopwatch:
        """See :class:`trainer.backends.base.Backend`."""
        if self.facts.runs_behind_host:
            return DeviceStopwatch(self.device)
        return HostStopwatch(lambda: None)

    def peak_flops_per_s(self) -> float | None:
        """See :class:`trainer.backends.base.Backend`."""
        if not self.facts.peak_flops_per_s:
            return None
        name = torch.get_device_module(self.device).get_device_name(self.device)
        return self.facts.peak(name, self._precision.fastest)
