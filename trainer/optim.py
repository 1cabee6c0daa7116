"""AdamW over what this process holds of each parameter, in the precision of the parameters.

A held part is a tensor of its own: the whole parameter, or the local slice of one that is cut over processes. Gradients
lie one behind another in one FP32 buffer, ordered by how many processes hold the same values, so that norms,
clipping and the reduction over replicas are a few large operations, whatever the number of parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from conf.schema import OptimizerConfig
from trainer.rounding import stochastic_round_
from trainer.shared_heads import Cut, Pieces


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """A parameter, as this process has it.

    Args:
        parameter: all of it, its slice, or a DTensor that shards that (FSDP).
        holders: processes that hold the same values, this one among them.
        copied_over: axes of the process mesh along which processes hold the same values.
        mesh: ``tp`` x ``dp`` processes that have the whole parameter together; none: this one alone.
        slice_dim: dimension that is cut over ``tp``, if it is.
        sharded: the slice's rows are cut over ``dp``; autograd leaves the gradient in a tensor of its own.
        partial_gradient: autograd's gradient has to be summed over ``tp``.
        cut: which pieces of the whole the slice is, if it is not the one of its rank.
    """

    parameter: nn.Parameter
    holders: int = 1
    copied_over: frozenset[str] = frozenset()
    mesh: DeviceMesh | None = None
    slice_dim: int | None = None
    sharded: bool = False
    partial_gradient: bool = False
    cut: Cut | None = None

    @property
    def autograd_fills_buffer(self) -> bool:
        """Gradients of whole or sliced FP32 parameters are views of our buffer."""
        return self.parameter.dtype == torch.float32 and not self.sharded

    def described(self, part: Tensor, *, first_row: int = 0) -> Tensor:
        """What this process has of a tensor that is cut like the parameter, with the description of how it is cut.

        Args:
            part: all of the slice, or the rows of it that this replica has.
            first_row: of the slice's; DTensor finds it by itself.
        """
        if self.mesh is None:
            return part
        shape = list(self.parameter.shape)
        if self.cut is not None:
            return self.cut.described(part, first_row, shape[0])
        if self.slice_dim is not None:
            shape[self.slice_dim] *= self.mesh["tp"].size()
        placements: list[Placement] = [
            Replicate() if self.slice_dim is None else Shard(self.slice_dim),
            Shard(0) if self.sharded else Replicate(),
        ]
        size = torch.Size(shape)
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=size, stride=stride)


class AdamW:
    """The optimizer.

    Args:
        held: parameters by name, on their device already.
        config: rates and decay; the learning rate comes with each step.
        stochastic_rounding: of BF16 weights and moments; the noise depends on (seed, step) alone.
        seed: of that noise.
        noise_device: where it is drawn; none: where the parameters are.
        fused: by PyTorch's fused kernel, where the device has it.
    """

    def __init__(
        self,
        held: Mapping[str, ParameterShard],
        config: OptimizerConfig,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
        noise_device: torch.device | None = None,
        fused: bool = True,
    ) -> None:
        self._config, self._stochastic, self._seed = config, stochastic_rounding, seed
        self._held = dict(sorted(held.items(), key=lambda item: item[1].holders))
        self._values = {name: local(part.parameter.detach()) for name, part in self._held.items()}
        first = next(iter(self._values.values()))
        size = sum(value.numel() for value in self._values.values())
        #: All gradients: sum it over the replicas between :meth:`collect_gradients` and :meth:`step`.
        self.gradients = torch.zeros(size, dtype=torch.float32, device=first.device)
        self._gradients: dict[str, Tensor] = {}
        offsets = itertools.accumulate((value.numel() for value in self._values.values()), initial=0)
        for (name, value), start in zip(self._values.items(), offsets, strict=False):
            self._gradients[name] = self.gradients[start : start + value.numel()].view(value.shape)
        self._moments = {
            kind: {name: torch.zeros_like(value) for name, value in self._values.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        self.step_count = 0
        """Updates done, which the bias correction depends on."""
        self._noise_device = noise_device or first.device
        self._torch = None if first.dtype == torch.bfloat16 else self._make_torch(fused=fused)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.gradients.zero_()
        for name, part in self._held.items():
            part.parameter.grad = self._gradients[name] if part.autograd_fills_buffer else None

    def collect_gradients(self) -> None:
        """Bring the gradients that autograd made into :attr:`gradients`."""
        for name, part in self._held.items():
            gradient = part.parameter.grad
            if gradient is not None and not part.autograd_fills_buffer:
                self._gradients[name].copy_(local(gradient))
        partial = [self._gradients[name] for name, part in self._held.items() if part.partial_gradient]
        if partial:
            mesh = next(part.mesh for part in self._held.values() if part.mesh is not None)
            summed = torch.cat([gradient.reshape(-1) for gradient in partial])
            dist.all_reduce(summed, group=mesh["tp"].get_group())
            sizes = [gradient.numel() for gradient in partial]
            for gradient, total in zip(partial, torch.split(summed, sizes), strict=True):
                gradient.copy_(total.view(gradient.shape))

    def squared_norms(self) -> Tensor:
        """Squared L2 norms of gradients and parameters, FP32 (2): this process's share.

        Summed over all processes they are the norms of the whole model, each parameter counted once.
        """
        totals = self.gradients.new_zeros(2)
        start = 0
        for holders, names in itertools.groupby(self._held, key=lambda name: self._held[name].holders):
            values = [self._values[name] for name in names]
            stop = start + sum(value.numel() for value in values)
            totals[0] += torch.linalg.vector_norm(self.gradients[start:stop]).square() / holders
            norms = torch._foreach_norm(values, 2, dtype=torch.float32)
            totals[1] += torch.stack(norms).square().sum() / holders
            start = stop
        return totals

    def norms_of_copies(self, axis: str) -> Tensor:
        """L2 norms, FP32, of the parameters that the processes along an axis hold copies of, in one order on all."""
        copies = [self._values[name] for name, part in sorted(self._held.items()) if axis in part.copied_over]
        norms = [torch.linalg.vector_norm(value, dtype=torch.float32) for value in copies]
        return torch.stack(norms) if norms else self.gradients.new_zeros(0)

    def step(self, *, lr: float, grad_scale: float) -> None:
        """Update the parameters with the gradients times ``grad_scale``."""
        if grad_scale != 1.0:
            self.gradients.mul_(grad_scale)
        self.step_count += 1
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._torch.step()
        else:
            self._step_bfloat16(lr)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name, as views: ``model.*``, ``exp_avg.*``, ``exp_avg_sq.*``."""
        kinds = {"model": self._values, **self._moments}
        return {
            f"{kind}.{name}": self._held[name].described(value)
            for kind, values in kinds.items()
            for name, value in values.items()
        }

    def loaded(self, step_count: int) -> None:
        """A checkpoint has been read into :meth:`tensors`."""
        self.step_count = step_count
        for state in self._torch.state.values() if self._torch else ():
            state["step"].fill_(step_count)

    def _decay_of(self, name: str) -> float:
        decays = self._config.decay == "all" or not name.endswith("norm.weight")
        return self._config.weight_decay if decays else 0.0

    def _make_torch(self, *, fused: bool) -> torch.optim.AdamW:
        """PyTorch's own, over the held parts; its moments are ours."""
        parts: dict[str, nn.Parameter] = {}
        for name, value in self._values.items():
            parts[name] = nn.Parameter(value)
            parts[name].grad = self._gradients[name]
        groups = [
            {"params": [parts[name] for name in names], "weight_decay": decay}
            for decay, names in itertools.groupby(sorted(parts, key=self._decay_of), key=self._decay_of)
        ]
        config = self._config
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
        for name, part in parts.items():
            state: dict[str, Any] = {kind: moments[name] for kind, moments in self._moments.items()}
            # Only the fused kernel counts on the device; elsewhere each update would wait for the number.
            counter = torch.zeros((), dtype=torch.float32, device=part.device if fused else "cpu")
            adamw.state[part] = {"step": counter, **state}
        return adamw

    def _step_bfloat16(self, lr: float) -> None:
        """The same update computed in FP32, one parameter at a time; weights and moments are rounded to BF16."""
        config, step = self._config, self.step_count
        noise = torch.Generator(self._noise_device).manual_seed((self._seed * 1_000_003 + step) % 2**64)
        scale1, scale2 = 1.0 - config.beta1**step, 1.0 - config.beta2**step
        for name, value in self._values.items():
            gradient = self._gradients[name]
            first = self._moments["exp_avg"][name].float().lerp_(gradient, 1.0 - config.beta1)
            second = self._moments["exp_avg_sq"][name].float()
            second.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
            new = value.float().mul_(1.0 - lr * self._decay_of(name))
            new.addcdiv_(first, (second / scale2).sqrt_().add_(config.eps), value=-lr / scale1)
            targets = (value, self._moments["exp_avg"][name], self._moments["exp_avg_sq"][name])
            for target, exact in zip(targets, (new, first, second), strict=True):
                if self._stochastic:
                    stochastic_round_(target, exact, noise)
                else:
                    target.copy_(exact)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor | Pieces) else tensor


def clip_scale(grad_norm: float, max_grad_norm: float) -> float:
    """The factor that brings gradients of a norm down to the largest allowed one; 1 if they are within it."""
    return min(1.0, max_grad_norm / max(grad_norm, 1e-12))
