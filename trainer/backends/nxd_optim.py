"""AdamW of NeuronX Distributed, plain or ZeRO-1, as the loop and checkpoints see an optimizer.

Norms and clipping are ours, hooked between the library's reduction of the gradients and the update. The library's own
norm adds up in the parameters' number format, and its ZeRO-1 clips to 1 whatever it is told (docs/decisions/0018).
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
from trainer.optim import ParameterShard

_MOMENTS = ("exp_avg", "exp_avg_sq")
#: For :meth:`NxdAdamW.norms_of_copies`: the processes that share a key/value head.
SHARERS = "kv"


class NxdAdamW:
    """The optimizer.

    Args:
        held: what this process has of each parameter, on the device, by our names.
        config: rates and decay; the learning rate comes with each step.
        nxd_config: what ``neuronx_distributed_config`` gave.
        dtype: of master weights and moments in ZeRO-1; without it they are as the parameters.
    """

    def __init__(
        self,
        held: Mapping[str, ParameterShard],
        config: OptimizerConfig,
        nxd_config: dict[str, Any],
        *,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._held = config, held
        decays = {name: config.decay == "all" or not name.endswith("norm.weight") for name in held}
        groups = [
            {"params": [part.parameter for name, part in held.items() if decays[name] == some], "weight_decay": decay}
            for some, decay in ((True, config.weight_decay), (False, 0.0))
            if some in decays.values()
        ]
        zero1 = nxd_config["optimizer_config"]["zero_one_enabled"]
        only_zero1: dict[str, Any] = {"optimizer_dtype": dtype} if zero1 else {}
        #: The library's own.
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
        names = {id(part.parameter): name for name, part in held.items()}
        #: What the update is made on: the parameters, or with ZeRO-1 this replica's rows of them in FP32 (padded).
        self._masters: dict[str, nn.Parameter] = {
            names[id(parameter)]: master
            for theirs, ours in zip(self.library.param_groups, self._inner.param_groups, strict=True)
            for parameter, master in zip(theirs["params"], ours["params"], strict=True)
        }
        for master in self._masters.values():  # now, so that the first step's graph is every step's
            self._inner.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        #: Those of which several processes have some rows, and of each row one over how many do, FP32 (rows, 1).
        self._shared = [name for name, part in held.items() if part.cut and part.cut.copied_rows]
        self._row_weights = self._weights_of_rows() if self._shared else None
        self._inner.register_step_pre_hook(self._reduce_and_clip)
        self._shares: Tensor | None = None
        self._sums: Tensor | None = None
        self.step_count = 0

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.library.zero_grad(set_to_none=True)

    def step(self, shares: Tensor, *, lr: float) -> Tensor:
        """Update the parameters.

        Args:
            shares: this process's share of the loss, and whether it was asked to stop (2).
            lr: learning rate.

        Returns:
            Loss, stops, and the squared norms of gradients and of parameters before the update, over all processes (4).
        """
        # A number of the graph's data, as all that changes from step to step (``capturable``): torch-xla merges plain
        # numbers that happen to be equal, and a bias correction that reaches 1 would make the graph another one.
        rate = torch.tensor(lr).to(shares.device)
        for group in self.library.param_groups:
            group["lr"] = rate
        self._shares = shares
        self.library.step()
        self.step_count += 1
        assert self._sums is not None, "the hook has run"
        return self._sums

    def norms_of_copies(self, axis: str) -> Tensor:
        """See :class:`trainer.backends.base.Optimizer`; along :data:`SHARERS` keys and values are copies."""
        held = [part for _, part in sorted(self._held.items())]
        if axis == SHARERS:
            copies = [part.parameter[-part.cut.copied_rows :] for part in held if part.cut and part.cut.copied_rows]
        else:
            copies = [part.parameter for part in held if axis in part.copied_over]
        norms = [torch.linalg.vector_norm(value.detach(), dtype=torch.float32) for value in copies]
        device = next(iter(self._masters.values())).device
        return torch.stack(norms) if norms else torch.zeros(0, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """On the device; with ZeRO-1 the padded rows, as they lie there."""
        found: dict[str, Tensor] = {f"model.{name}": master.detach() for name, master in self._masters.items()}
        for kind in _MOMENTS:
            found |= {f"{kind}.{name}": self._inner.state[master][kind] for name, master in self._masters.items()}
        return found

    def described(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in host memory, named and shaped as in :meth:`tensors`, without padding, with how it is cut."""
        parameter = name.split(".", 1)[1]
        start, stop = self._rows(parameter)
        return self._held[parameter].described(tensor[: stop - start], first_row=start)

    def host_target(self, name: str) -> Tensor:
        """Memory to read a tensor of a checkpoint into: of a weight the whole slice, for the parameter needs it all."""
        kind, parameter = name.split(".", 1)
        held, master = self._held[parameter], self._masters[parameter]
        if kind == "model":
            return replace(held, sharded=False).described(torch.empty(held.parameter.shape, dtype=master.dtype))
        return self.described(name, torch.empty(master.shape, dtype=master.dtype))

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Set a tensor of :meth:`tensors` from what :meth:`host_target` gave."""
        kind, parameter = name.split(".", 1)
        if kind == "model":
            self.write_weights(parameter, value)
        else:
            state = self._inner.state[self._masters[parameter]]
            state[kind].copy_(_padded(value, state[kind]))

    @torch.no_grad()
    def write_weights(self, name: str, value: Tensor) -> None:
        """Set a parameter, and its master, from this process's whole slice of it in host memory."""
        parameter, master = self._held[name].parameter, self._masters[name]
        parameter.copy_(value.to(parameter.dtype))
        if self._zero is not None:
            master.copy_(_padded(value[slice(*self._rows(name))], master))

    def _rows(self, name: str) -> tuple[int, int]:
        """Which rows of this process's slice of a parameter its master has, besides padding."""
        size = self._held[name].parameter.shape[0]
        if self._zero is None:
            return 0, size
        share = math.ceil(size / self._zero.local_world_size)
        start = min(size, share * int(self._zero.local_rank))
        return start, min(size, start + share)

    @torch.no_grad()
    def take_over(self, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Set everything from what the library's own ``load_checkpoint`` gave: tensors by name, and by number."""
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
        """A checkpoint has been read."""
        self.step_count = step_count
        for state in self._inner.state.values():
            state["step"].copy_(torch.tensor(float(step_count)))

    @torch.no_grad()
    def _reduce_and_clip(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Between reduction and update: all of a step's sums in one exchange, then the gradients are scaled."""
        assert self._shares is not None
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        self._sum_over_sharers(gradients)
        squares = [
            sum((self._square(name, tensor) for name, tensor in tensors.items()), start=self._shares.new_zeros(()))
            for tensors in (gradients, self._masters)
        ]
        sums = torch.cat((self._shares, torch.stack(squares)))
        dist.all_reduce(sums)
        scale = (self._config.max_grad_norm / sums[2].sqrt().clamp_min(1e-12)).clamp_max(1.0)
        for gradient in gradients.values():
            gradient.mul_(scale.to(gradient.dtype))
        self._sums = sums

    def _square(self, name: str, tensor: Tensor) -> Tensor:
        """Squared norm, FP32: this process's share, of which the holders of the same values have one each."""
        squares = tensor.detach().float().square()
        if self._row_weights is not None and name in self._shared:
            squares = squares * self._row_weights
        return squares.sum() / self._held[name].holders

    def _weights_of_rows(self) -> Tensor:
        """For every layer the same. Data, for with ZeRO-1 each replica has other rows, but all the same graph."""
        name = self._shared[0]
        held, master = self._held[name], self._masters[name]
        assert held.cut is not None
        rows = held.cut.weights_of_rows(held.parameter.shape[0])[slice(*self._rows(name))]
        return _padded(rows, torch.empty(master.shape[0], 1)).to(master.device)

    def _sum_over_sharers(self, gradients: Mapping[str, Tensor]) -> None:
        """Of a key/value head that several processes have, each knows the gradient that its own queries cause."""
        if self._row_weights is None:
            return
        copied = self._row_weights < 1.0
        total = torch.stack([torch.where(copied, gradients[name].float(), 0.0) for name in self._shared])
        dist.all_reduce(total, group=parallel_state.get_kv_shared_group())
        for name, summed in zip(self._shared, total, strict=True):
            gradients[name].copy_(torch.where(copied, summed, gradients[name]))


def _padded(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in host memory, with zeros behind them up to another tensor's shape."""
    padded = torch.zeros(like.shape, dtype=like.dtype)
    padded[: rows.shape[0]] = rows
    return padded
