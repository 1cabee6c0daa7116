"""AdamW over one flat buffer: parameters, gradients and both moments each lie in one piece of memory.

So the gradient norm, the clipping, the reduction over processes and the update are one operation each, whatever the
number of parameters. That is exact because every parameter decays and has the same rate (HLAT decays norms too). The
tail of the gradient buffer carries what a step has to sum over processes anyway, so that there is one reduction a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conf.schema import OptimizerConfig


class FlatAdamW:
    """The optimizer; takes over the memory of the model's parameters and gradients.

    Args:
        model: on its device already; its parameters and gradients become views of the flat buffers.
        config: rates and decay; the learning rate comes with each step.
        extra: numbers at the end of :attr:`reduced`, after the gradients.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, extra: int) -> None:
        parameters = dict(model.named_parameters())
        self._spans: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in parameters.items():
            self._spans[name] = (size, parameter.shape)
            size += parameter.numel()
        like = next(iter(parameters.values()))
        self._flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters.values()]))
        #: Gradients and then ``extra`` numbers: sum it over processes before :meth:`step`.
        self.reduced = torch.zeros(size + extra, dtype=like.dtype, device=like.device)
        self.extra = self.reduced[size:]
        self._gradient = self.reduced[:size]
        for name, parameter in parameters.items():
            parameter.data = self._view(self._flat.data, name)
            parameter.grad = self._view(self._gradient, name)
        self._flat.grad = self._gradient
        self._adamw = torch.optim.AdamW(
            [self._flat], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        # As AdamW itself starts them; here already, for a checkpoint to be loaded into.
        self._state: dict[str, Tensor] = {
            "step": torch.zeros((), dtype=torch.float32, device=like.device),
            "exp_avg": torch.zeros_like(self._flat.data),
            "exp_avg_sq": torch.zeros_like(self._flat.data),
        }
        self._adamw.state[self._flat] = self._state

    def zero_grad(self) -> None:
        """Clear the gradients and the extra numbers."""
        self.reduced.zero_()

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients as they are now."""
        return torch.linalg.vector_norm(self._gradient)  # type: ignore[no-any-return]

    def param_norm(self) -> Tensor:
        """Global L2 norm of the parameters."""
        return torch.linalg.vector_norm(self._flat.detach())  # type: ignore[no-any-return]

    def step(self, *, lr: float, grad_scale: float) -> None:
        """Update the parameters with the gradients times ``grad_scale``."""
        if grad_scale != 1.0:
            self._gradient.mul_(grad_scale)
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()

    @property
    def step_count(self) -> int:
        """Updates done, which the bias correction depends on."""
        return int(self._state["step"].item())

    @step_count.setter
    def step_count(self, steps: int) -> None:
        self._state["step"].fill_(steps)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name, as views: ``model.*``, ``exp_avg.*``, ``exp_avg_sq.*``."""
        buffers = {"model": self._flat.data, "exp_avg": self._state["exp_avg"], "exp_avg_sq": self._state["exp_avg_sq"]}
        return {f"{kind}.{name}": self._view(flat, name) for kind, flat in buffers.items() for name in self._spans}

    def _view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self._spans[name]
        return flat[start : start + shape.numel()].view(shape)


def clip_scale(grad_norm: float, max_grad_norm: float) -> float:
    """The factor that brings gradients of a norm down to the largest allowed one; 1 if they are within it."""
    return min(1.0, max_grad_norm / max(grad_norm, 1e-12))
