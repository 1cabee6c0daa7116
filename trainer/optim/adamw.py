"""AdamW over this process's shard of each parameter, in the precision of the parameters.

A shard is a separate tensor: the whole parameter, or the local slice of one. All gradients are views of one FP32
buffer, ordered by how many processes have the same values. So norms, clipping and the reduction over replicas are a few
large operations, regardless of the number of parameters. Autograd adds gradients of FP32 parameters to the buffer.
Those of BF16 parameters are added as soon as a backward pass has computed them: a sum of micro-batches in BF16 would
lose those that are below 1/256 of it.

BF16 parameters can be rounded stochastically: the mean over many roundings is the exact value. Rounding to the nearest
loses every update below half a unit in the last place (1/256 of a weight). Stochastic rounding keeps it with the right
probability (HLAT, arXiv 2404.10630, section 3.3). The noise is made from a counter like the initial weights. So
torch.compile makes one kernel of noise, update and rounding, and the bits don't depend on how many elements it takes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from conf.parametrization import rate_factor
from conf.schema import Config, ModelConfig, OptimizerConfig
from trainer.model.initial import GAMMA, mixed
from trainer.parallel.tensor import ShardSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


#: BF16 is the upper half of FP32.
_LOWER_BITS = 16
#: The average of the weights has a decay of at most n / (n + this) after n updates.
EMA_WARMUP_UPDATES = 9
#: Elements that an update without torch.compile computes together, so that its intermediate results stay small.
_BLOCK_ENTRIES = 1 << 24


def rounded_stochastically(exact: Tensor, noise: Tensor) -> Tensor:
    """Return FP32 values that BF16 can hold: rounded up or down, in proportion to their distance.

    NaN and infinities don't change.

    Args:
        noise: integers of which the 16 lower bits are random, int32 or int64.
    """
    bits = exact.contiguous().view(torch.int32)
    bits = bits + noise.bitwise_and((1 << _LOWER_BITS) - 1).to(torch.int32)
    return torch.where(exact.isfinite(), bits.bitwise_and(-(1 << _LOWER_BITS)).view(torch.float32), exact)


@torch.no_grad()
def _update_bfloat16(
    old: Sequence[Tensor],
    gradient: Tensor,
    numbers: Sequence[Tensor],
    counter: Tensor | None,
    skips: Tensor | None,
    config: OptimizerConfig,
) -> None:
    """Update a weight and its two moments, BF16 (n), in FP32, and round them.

    Only single multiplications, additions and divisions, in this order: so a CPU's compiled bits are those of its
    uncompiled operations. A GPU's compiler may multiply and add with one rounding.

    Args:
        numbers: the learning rate, the factor of weight decay and the bias corrections, FP32 (). As numbers of Python,
            they would be constants, and each step would be compiled again.
        counter: of the first element, int64 (); None: round to the nearest.
        skips: whether nothing is updated, bool ().
    """
    rate, shrink, scale1, scale2 = numbers
    first = old[1].float() * config.beta1 + gradient * (1.0 - config.beta1)
    second = old[2].float() * config.beta2 + gradient * gradient * (1.0 - config.beta2)
    new = old[0].float() * shrink - rate * (first / scale1) / ((second / scale2).sqrt() + config.eps)
    words = None
    if counter is not None:
        words = mixed(torch.arange(gradient.numel(), device=gradient.device) * GAMMA + counter)
    for place, (target, exact) in enumerate(zip(old, (new, first, second), strict=True)):
        if words is not None:
            exact = rounded_stochastically(exact, words >> place * _LOWER_BITS)
        target.copy_(exact if skips is None else torch.where(skips, target.float(), exact))


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """The part of a parameter that a process has.

    Args:
        parameter: the whole parameter, a slice, or a DTensor that shards one of these (FSDP).
        replication: number of processes with the same values, including this one.
        replicated_over: axes of the process mesh along which processes have the same values.
        mesh: the ``tp`` x ``dp`` (or ``tp`` x ``replicate`` x ``dp``) processes that together have the parameter; None
            if this process has all of it.
        slice_dim: the dimension that is sharded over ``tp``, if any.
        sharded: the slice's rows are sharded over ``dp``, by FSDP.
        partial_gradient: autograd's gradient must be summed over ``tp``.
        shard_spec: where the slice is in the whole parameter, if slices are not in the order of the ranks.
    """

    parameter: nn.Parameter
    replication: int = 1
    replicated_over: frozenset[str] = frozenset()
    mesh: DeviceMesh | None = None
    slice_dim: int | None = None
    sharded: bool = False
    partial_gradient: bool = False
    shard_spec: ShardSpec | None = None

    def gradient_in(self, buffer: Tensor) -> Tensor:
        """Return the buffer in the parameter's form: FSDP adds its shard to an existing gradient in place."""
        if not self.sharded:
            return buffer
        from torch.distributed.tensor import DTensor

        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return buffer
        mesh, placements = parameter.device_mesh, parameter.placements
        size, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(buffer, mesh, placements, run_check=False, shape=size, stride=stride)

    def as_distributed(self, part: Tensor, *, first_row: int = 0) -> Tensor:
        """Attach the position in the whole to a tensor that is sharded like the parameter.

        Args:
            part: the whole slice, or this replica's rows of it.
            first_row: the part's first row in the slice; not needed for a DTensor.
        """
        if self.mesh is None:
            return part
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = list(self.parameter.shape)
        if self.shard_spec is not None:
            replicas = self.mesh["dp"]
            replica = (0, 1) if self.sharded else (replicas.get_local_rank(), replicas.size())
            return self.shard_spec.as_distributed(part, first_row, shape[0], replica)
        if self.slice_dim is not None:
            shape[self.slice_dim] *= self.mesh["tp"].size()
        placements: list[Placement] = [Replicate() for _ in range(self.mesh.ndim)]
        if self.slice_dim is not None:
            placements[0] = Shard(self.slice_dim)
        if self.sharded:
            placements[-1] = Shard(0)
        size = torch.Size(shape)
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=size, stride=stride)


class _Factors(NamedTuple):
    """What the learning rate of a parameter is multiplied with: for its step, and for its decay."""

    rate: float
    decay: float


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Flat aliases of a weight, its two moments and its gradient, with the first one's place in all gradients."""

    old: list[Tensor]
    gradient: Tensor
    place: int
    factors: _Factors


class AdamW:
    """AdamW over this process's shards.

    Args:
        shards: the shards, on their device, by the parameter's name.
        config: betas, epsilon, decay and the average of the weights; each step gets its learning rate.
        stochastic_rounding: round BF16 weights and moments stochastically; the noise depends only on (seed, step).
            Unset, they are rounded as the device rounds when it copies to BF16.
        seed: seed of that noise.
        fused: use PyTorch's fused kernel.
        compile_backend: of torch.compile, for updates that are rounded stochastically; None: don't compile them.
        others: parameters that a derived class updates; they have no second moment.
        model: the model, from which the learning rate of each parameter follows; None: all have the same.
    """

    def __init__(
        self,
        shards: Mapping[str, ParameterShard],
        config: OptimizerConfig,
        *,
        model: ModelConfig | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        fused: bool = True,
        compile_backend: str | None = None,
        others: Collection[str] = (),
    ) -> None:
        self._config, self._model, self._stochastic, self._seed = config, model, stochastic_rounding, seed
        self._shards = dict(sorted(shards.items(), key=lambda item: item[1].replication))
        self._values = {name: local(shard.parameter.detach()) for name, shard in self._shards.items()}
        first = next(iter(self._values.values()))
        size = sum(value.numel() for value in self._values.values())
        #: All gradients. The backend sums them over the replicas before :meth:`step`.
        self.gradients = torch.zeros(size, dtype=torch.float32, device=first.device)
        self._gradients: dict[str, Tensor] = {}
        offsets = itertools.accumulate((value.numel() for value in self._values.values()), initial=0)
        for (name, value), start in zip(self._values.items(), offsets, strict=False):
            self._gradients[name] = self.gradients[start : start + value.numel()].view(value.shape)
        self._moments = {
            "exp_avg": {name: torch.zeros_like(value) for name, value in self._values.items()},
            "exp_avg_sq": {name: torch.zeros_like(value) for name, value in self._values.items() if name not in others},
        }
        #: Average of the weights, FP32. The first update replaces it, so its values before don't matter.
        self._average: dict[str, Tensor] = {}
        if config.ema_decay is not None:
            self._average = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in self._values.items()}
        #: Number of updates, FP32, on the device, which knows if it skipped one. The bias correction depends on it.
        self._updates = torch.zeros((), dtype=torch.float32, device=first.device)
        self._fused = fused
        self._update, entries = _update_bfloat16, _BLOCK_ENTRIES
        if compile_backend and stochastic_rounding:
            self._update = torch.compile(_update_bfloat16, dynamic=True, fullgraph=True, backend=compile_backend)
            entries = size  # its intermediate results are no tensors
        by_torch = self._moments["exp_avg_sq"] and first.dtype != torch.bfloat16
        self._groups = self._grouped(fused=fused) if by_torch else ()
        self._blocks = [] if by_torch else list(self._blocks_of(entries))
        places = torch.tensor([block.place for block in self._blocks], dtype=torch.int64)
        # Not `to`: of a tensor without values, which a trace has, it would run on the device.
        self._counters = torch.empty(len(places), dtype=torch.int64, device=first.device).copy_(places.mul_(GAMMA))
        for name, shard in self._shards.items():
            if shard.parameter.dtype != torch.float32:
                shard.parameter.register_post_accumulate_grad_hook(_adder(self._gradients[name]))  # type: ignore[no-untyped-call]
        self.zero_grad()

    @classmethod
    def of(cls, shards: Mapping[str, ParameterShard], config: Config, **options: Any) -> Self:
        """Return the optimizer of a configuration (``conf.registries.OPTIMIZERS``).

        Args:
            options: further arguments of the class.
        """
        return cls(shards, config.optimizer, model=config.model, **options)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.gradients.zero_()
        for name, shard in self._shards.items():
            fills = shard.parameter.dtype == torch.float32
            shard.parameter.grad = shard.gradient_in(self._gradients[name]) if fills else None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters in the order of :attr:`gradients`."""
        return [(name, shard.parameter) for name, shard in self._shards.items()]

    def gradient(self, name: str) -> Tensor:
        """Return the view of :attr:`gradients` that belongs to a parameter."""
        return self._gradients[name]

    def sum_partial_gradients(self) -> None:
        """Sum over ``tp`` the gradients of which each process has a part."""
        partial = [self._gradients[name] for name, shard in self._shards.items() if shard.partial_gradient]
        if partial:
            mesh = next(shard.mesh for shard in self._shards.values() if shard.mesh is not None)
            summed = torch.cat([gradient.reshape(-1) for gradient in partial])
            dist.all_reduce(summed, group=mesh["tp"].get_group())
            sizes = [gradient.numel() for gradient in partial]
            for gradient, total in zip(partial, torch.split(summed, sizes), strict=True):
                gradient.copy_(total.view(gradient.shape))

    def squared_norms(self) -> Tensor:
        """Return this process's share of the squared L2 norms of gradients and parameters, FP32 (2).

        The sums over all processes count each parameter once.
        """
        totals = self.gradients.new_zeros(2)
        start = 0
        for replication, names in itertools.groupby(self._shards, key=lambda name: self._shards[name].replication):
            values = [self._values[name] for name in names]
            stop = start + sum(value.numel() for value in values)
            totals[0] += torch.linalg.vector_norm(self.gradients[start:stop]).square() / replication
            norms = torch._foreach_norm(values, 2, dtype=torch.float32)
            totals[1] += torch.stack(norms).square().sum() / replication
            start = stop
        return totals

    def replicated_norms(self, axis: str) -> Tensor:
        """See :class:`trainer.backends.base.Optimizer`."""
        values = [self._values[name] for name, shard in sorted(self._shards.items()) if axis in shard.replicated_over]
        norms = [torch.linalg.vector_norm(value, dtype=torch.float32) for value in values]
        return torch.stack(norms) if norms else self.gradients.new_zeros(0)

    @property
    def step_count(self) -> int:
        """Number of updates, without skipped ones. Waits for the device."""
        return int(self._updates)

    def step(self, *, lr: float, number: int, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update the parameters. With a fused kernel nothing waits for the device.

        Args:
            number: number of the training step; the noise of the rounding depends on it.
            divisor: divides the gradients, FP32 (), see :func:`clip_divisor`; None: 1.
            skip: 1 to skip the update, otherwise 0, FP32 (); None: 0.
        """
        if not self._groups:
            self._step_bfloat16(lr, number, divisor, skip)
        elif self._fused:
            self._step_torch(lr, divisor, skip)  # as GradScaler does
        elif skip is None or not bool(skip):
            self._divide(divisor)
            self._step_torch(lr)
        self._add_to_average(skip)
        self._updates += 1 if skip is None else 1 - skip

    @torch.no_grad()
    def _add_to_average(self, skip: Tensor | None) -> None:
        """Move the average towards the weights. The decay grows from 0, so that the initial weights are forgotten."""
        if not self._average:
            return
        decay = (self._updates / (self._updates + EMA_WARMUP_UPDATES)).clamp_max(self._config.ema_decay or 0.0)
        share = 1.0 - decay if skip is None else (1.0 - decay) * (1.0 - skip)
        for name, average in self._average.items():
            average.lerp_(self._values[name].float(), share)

    def _divide(self, divisor: Tensor | None) -> None:
        if divisor is not None:
            self.gradients.div_(divisor)

    def _step_torch(self, lr: float, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        config = self._config
        for factors, group in self._groups:
            adamw(
                **group,
                grad_scale=divisor,
                found_inf=skip,
                max_exp_avg_sqs=[],
                foreach=False,
                fused=self._fused,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr * factors.rate,
                weight_decay=factors.decay / factors.rate,  # PyTorch multiplies it by the learning rate
                eps=config.eps,
                maximize=False,
            )

    def tensors(self) -> dict[str, Tensor]:
        """See :class:`trainer.backends.base.Optimizer`."""
        kinds = {"model": self._values, **self._moments, "ema": self._average}
        return {
            f"{kind}.{name}": self._shards[name].as_distributed(value)
            for kind, values in kinds.items()
            for name, value in values.items()
        }

    def loaded(self, step_count: int) -> None:
        """Set the number of updates after a checkpoint has been read into :meth:`tensors`."""
        self._updates.fill_(step_count)
        for _, group in self._groups:
            for counter in group["state_steps"]:
                counter.fill_(step_count)

    def _decay_of(self, name: str) -> float:
        decays = self._config.decay == "all" or not name.endswith("norm.weight")
        return self._config.weight_decay if decays else 0.0

    def _factors_of(self, name: str) -> _Factors:
        return _Factors(rate_factor(name, self._model) if self._model else 1.0, self._decay_of(name))

    def _grouped(self, *, fused: bool) -> tuple[tuple[_Factors, dict[str, Any]], ...]:
        """Return the arguments of PyTorch's function for the parameters with the same factors.

        PyTorch's class would import its compiler, which takes as long as the rest of PyTorch.
        """
        # Only the fused kernel reads the counter on the device; the others would wait for it at each update.
        device = self.gradients.device if fused else torch.device("cpu")
        names = sorted(self._moments["exp_avg_sq"], key=self._factors_of)
        return tuple(
            (
                factors,
                {
                    "params": [self._values[name] for name in group],
                    "grads": [self._gradients[name] for name in group],
                    "exp_avgs": [self._moments["exp_avg"][name] for name in group],
                    "exp_avg_sqs": [self._moments["exp_avg_sq"][name] for name in group],
                    "state_steps": [torch.zeros((), dtype=torch.float32, device=device) for _ in group],
                },
            )
            for factors, members in itertools.groupby(names, key=self._factors_of)
            for group in (list(members),)
        )

    def _blocks_of(self, entries: int) -> Iterator[_Block]:
        """Yield what is updated together, in BF16: parameters, or parts of these with some entries."""
        for name, second in self._moments["exp_avg_sq"].items():
            gradient = self._gradients[name]
            tensors = (self._values[name], self._moments["exp_avg"][name], second, gradient)
            for start in range(0, gradient.numel(), entries):
                *old, part = (_alias(tensor, start, entries) for tensor in tensors)
                place, factors = int(part.storage_offset()), self._factors_of(name)
                yield _Block(old=old, gradient=part, place=place, factors=factors)

    def _step_bfloat16(self, lr: float, number: int, divisor: Tensor | None, skip: Tensor | None) -> None:
        """Compute the update in FP32, and round weights and moments to BF16."""
        config, skips = self._config, None if skip is None else skip.bool()
        on_device = functools.partial(torch.full, (), device=self.gradients.device)
        of_factors = {
            factors: (on_device(lr * factors.rate), on_device(1.0 - lr * factors.decay))
            for factors in {block.factors for block in self._blocks}
        }
        scales = [_one_minus_power(beta, self._updates + 1) for beta in (config.beta1, config.beta2)]
        key = int.from_bytes(hashlib.sha256(f"{self._seed}/{number}".encode()).digest()[:8], "big", signed=True)
        counters = (self._counters + on_device(key)).unbind() if self._stochastic else [None] * len(self._blocks)
        self._divide(divisor)
        for block, counter in zip(self._blocks, counters, strict=True):
            numbers = (*of_factors[block.factors], *scales)
            self._update(block.old, block.gradient, numbers, counter, skips, config)


def _alias(tensor: Tensor, start: int, entries: int) -> Tensor:
    """Return some entries of a contiguous tensor, flat. It is no view: views of other shapes are compiled again."""
    assert tensor.is_contiguous()
    count = min(entries, tensor.numel() - start)
    alias = tensor.new_empty(0)
    alias.set_(tensor.untyped_storage(), int(tensor.storage_offset()) + start, (count,), (1,))
    return alias


def _adder(gradients: Tensor) -> Callable[[nn.Parameter], None]:
    """Return a hook that moves a backward pass's gradient to the sum; FSDP calls it with its shard of all processes."""

    def add(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradients.add_(local(parameter.grad))
        parameter.grad = None

    return add


def _one_minus_power(beta: float, exponent: Tensor) -> Tensor:
    """Return 1 - beta ** exponent, FP32 (), exact even where both are almost equal."""
    return -torch.expm1(exponent * (math.log(beta) if beta else -math.inf))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, which may be a DTensor or an UnevenShard."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor


def clip_divisor(squared_norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the divisor of gradients that limits their norm to ``max_grad_norm``; 1 if it is already below."""
    return (squared_norm.sqrt() / max_grad_norm).clamp_min(1.0)
