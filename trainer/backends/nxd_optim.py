"""AdamW of NeuronX Distributed, plain or ZeRO-1, behind the interface that the loop and checkpoints use.

A hook between the library's reduction of the gradients and its update computes norms and clips. The library's own norm
sums in the parameters' number format, and its ZeRO-1 always clips to 1 (docs/decisions/0018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor, nn

from conf.schema import OptimizerConfig
from trainer.optim.adamw import ParameterShard

_MOMENTS = ("exp_avg", "exp_avg_sq")
#: For :meth:`NxdAdamW.replicated_norms`: the processes that share a key/value head.
KV_REPLICAS = "kv"


class NxdAdamW:
    """AdamW over this process's shards on the device, given by the parameter's name in our model.

    ``nxd_config`` is the result of ``neuronx_distributed_config``; ``dtype`` is that of master weights and moments with
    ZeRO-1. Without it they have the parameters' dtype.
    """

    def __init__(
        self,
        shards: Mapping[str, ParameterShard],
        config: OptimizerConfig,
        nxd_config: dict[str, Any],
        *,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._shards = config, shards
        decays = {name: config.decay == "all" or not name.endswith("norm.weight") for name in shards}
        groups = [
            {
                "params": [shard.parameter for name, shard in shards.items() if decays[name] == some],
                "weight_decay": decay,
            }
            for some, decay in ((True, config.weight_decay), (False, 0.0))
            if some in decays.values()
        ]
        zero1 = nxd_config["optimizer_config"]["zero_one_enabled"]
        only_zero1: dict[str, Any] = {"optimizer_dtype": dtype} if zero1 else {}
        #: The library's optimizer.
        self.library = nxd.initialize_parallel_optimizer(
            nxd_config,
            torch.optim.AdamW,
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=False,
            fused=False,
            capturable=True,
            **only_zero1,
        )
        self._zero = self.library.optimizer if zero1 else None
        self._inner: torch.optim.Optimizer = self._zero.base_optimizer if self._zero else self.library.optimizer
        names = {id(shard.parameter): name for name, shard in shards.items()}
        #: The tensors that are updated: the parameters, or with ZeRO-1 this replica's rows in FP32 (padded).
        self._masters: dict[str, nn.Parameter] = {
            names[id(parameter)]: master
            for theirs, ours in zip(self.library.param_groups, self._inner.param_groups, strict=True)
            for parameter, master in zip(theirs["params"], ours["params"], strict=True)
        }
        for master in self._masters.values():  # before the first step, so that all steps have the same graph
            self._inner.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        #: Parameters with rows that several processes have, and the rows' weights, FP32 (rows, 1).
        self._shared = [name for name, shard in shards.items() if shard.shard_spec and shard.shard_spec.replicated_rows]
        self._row_weights = self._make_row_weights() if self._shared else None
        self._inner.register_step_pre_hook(self._reduce_and_clip)
        self._shares: Tensor | None = None
        self._sums: Tensor | None = None
        self.step_count = 0

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.library.zero_grad(set_to_none=True)

    def step(self, shares: Tensor, *, lr: float) -> Tensor:
        """Update the parameters; return sums over all processes, for ``StepMetrics.of``.

        ``shares`` has this process's share of the loss, its signal, and its ``StepNumbers``.
        """
        # Everything that changes between steps must be data of the graph (``capturable``). torch-xla merges equal
        # Python numbers, so a bias correction that reaches 1 would change the graph.
        rate = torch.tensor(lr).to(shares.device)
        for group in self.library.param_groups:
            group["lr"] = rate
        self._shares = shares
        self.library.step()
        self.step_count += 1
        assert self._sums is not None, "the hook has run"
        return self._sums

    def replicated_norms(self, axis: str) -> Tensor:
        """See :class:`trainer.backends.base.Optimizer`; along :data:`KV_REPLICAS`, keys and values are replicated."""
        values: list[Tensor] = []
        for _, shard in sorted(self._shards.items()):
            if axis in shard.replicated_over:
                values.append(shard.parameter)
            elif axis == KV_REPLICAS and shard.shard_spec and shard.shard_spec.replicated_rows:
                values.append(shard.parameter[-shard.shard_spec.replicated_rows :])
        norms = [torch.linalg.vector_norm(value.detach(), dtype=torch.float32) for value in values]
        device = next(iter(self._masters.values())).device
        return torch.stack(norms) if norms else torch.zeros(0, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name, on the device; with ZeRO-1 the padded rows."""
        tensors: dict[str, Tensor] = {f"model.{name}": master.detach() for name, master in self._masters.items()}
        for kind in _MOMENTS:
            tensors |= {f"{kind}.{name}": self._inner.state[master][kind] for name, master in self._masters.items()}
        return tensors

    def as_distributed(self, name: str, tensor: Tensor) -> Tensor:
        """Remove the padding of a tensor of :meth:`tensors` in host memory, and attach its position in the whole."""
        parameter = name.split(".", 1)[1]
        start, stop = self._rows(parameter)
        return self._shards[parameter].as_distributed(tensor[: stop - start], first_row=start)

    def host_target(self, name: str) -> Tensor:
        """Return memory for a checkpoint's tensor: the whole slice for weights, otherwise this replica's rows."""
        kind, parameter = name.split(".", 1)
        shard, master = self._shards[parameter], self._masters[parameter]
        if kind == "model":
            return replace(shard, sharded=False).as_distributed(torch.empty(shard.parameter.shape, dtype=master.dtype))
        return self.as_distributed(name, torch.empty(master.shape, dtype=master.dtype))

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Set a tensor of :meth:`tensors` from one that :meth:`host_target` returned."""
        kind, parameter = name.split(".", 1)
        if kind == "model":
            self.write_weights(parameter, value)
        else:
            state = self._inner.state[self._masters[parameter]]
            state[kind].copy_(_padded(value, state[kind]))

    @torch.no_grad()
    def write_weights(self, name: str, value: Tensor) -> None:
        """Set a parameter and its master weights from this process's whole slice in host memory."""
        parameter, master = self._shards[name].parameter, self._masters[name]
        parameter.copy_(value.to(parameter.dtype))
        if self._zero is not None:
            master.copy_(_padded(value[slice(*self._rows(name))], master))

    def _rows(self, name: str) -> tuple[int, int]:
        """Return the range of the slice's rows that the master weights have, without padding."""
        size = self._shards[name].parameter.shape[0]
        if self._zero is None:
            return 0, size
        share = math.ceil(size / self._zero.local_world_size)
        start = min(size, share * int(self._zero.local_rank))
        return start, min(size, start + share)

    @torch.no_grad()
    def take_over(self, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Set all tensors from the result of the library's ``load_checkpoint``: weights by name, state by number."""
        moments = state["state" if self._zero is None else "base_state"]
        masters = state.get("sharded_master_weights", {})
        for number, (name, master) in enumerate(self._masters.items()):
            self.write_weights(name, model[f"llama.{name}"].cpu())
            if number in masters:
                master.copy_(masters[number])
            for kind in _MOMENTS:
                self._inner.state[master][kind].copy_(moments[number][kind])
        self.loaded(int(moments[0]["step"]))

    def loaded(self, step_count: int) -> None:
        """Set the number of updates after a checkpoint has been read."""
        self.step_count = step_count
        for state in self._inner.state.values():
            state["step"].copy_(torch.tensor(float(step_count)))

    @torch.no_grad()
    def _reduce_and_clip(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert self._shares is not None
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        self._sum_over_kv_replicas(gradients)
        squares = [
            sum((self._square(name, tensor) for name, tensor in tensors.items()), start=self._shares.new_zeros(()))
            for tensors in (gradients, self._masters)
        ]
        sums = torch.cat((self._shares[:2], torch.stack(squares), self._shares[2:]))
        dist.all_reduce(sums)
        scale = (self._config.max_grad_norm / sums[2].sqrt().clamp_min(1e-12)).clamp_max(1.0)
        for gradient in gradients.values():
            gradient.mul_(scale.to(gradient.dtype))
        self._sums = sums

    def _square(self, name: str, tensor: Tensor) -> Tensor:
        squares = tensor.detach().float().square()
        if self._row_weights is not None and name in self._shared:
            squares = squares * self._row_weights
        return squares.sum() / self._shards[name].replication

    def _make_row_weights(self) -> Tensor:
        """Return the weights of this replica's rows; equal in all layers, and data of the graph."""
        name = self._shared[0]
        shard, master = self._shards[name], self._masters[name]
        assert shard.shard_spec is not None
        rows = shard.shard_spec.row_weights(shard.parameter.shape[0])[slice(*self._rows(name))]
        return _padded(rows, torch.empty(master.shape[0], 1)).to(master.device)

    def _sum_over_kv_replicas(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients of shared key/value heads: each process has computed them from its own queries only."""
        if self._row_weights is None:
            return
        replicated = self._row_weights < 1.0
        total = torch.stack([torch.where(replicated, gradients[name].float(), 0.0) for name in self._shared])
        dist.all_reduce(total, group=parallel_state.get_kv_shared_group())
        for name, summed in zip(self._shared, total, strict=True):
            gradients[name].copy_(torch.where(replicated, summed, gradients[name]))


def _padded(rows: Tensor, like: Tensor) -> Tensor:
    padded = torch.zeros(like.shape, dtype=like.dtype)
    padded[: rows.shape[0]] = rows
    return padded
