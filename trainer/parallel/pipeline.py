"""Pipeline-parallel training with the 1F1B schedule of PyTorch's pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainer.model.decoder import Llama
from trainer.parallel.layout import Layout


class Pipeline:
    """Runs the micro-batches of a step through all stages.

    ``loss`` computes the loss from a micro-batch's hidden states and targets; it is called for the last stage.
    """

    def __init__(self, model: Llama, layout: Layout, loss: Callable[[Tensor, Tensor], Tensor], device: torch.device):
        self._first, self._last, self._device = model.is_first, model.is_last, device
        self._masks_documents = model.document_end_id is not None
        # The loss is already scaled.
        self._schedule = Schedule1F1B(
            _make_stage(model, layout, device), layout.config.grad_accum_steps, loss_fn=loss, scale_grads=False
        )

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of (batch, seq) tokens; return the sum of losses on the last stage, otherwise 0."""
        losses: list[Tensor] = []
        masked: dict[str, Any] = {"tokens": inputs} if self._masks_documents else {}
        if self._last:
            self._schedule.step(target=targets, losses=losses, **masked)
        elif self._first:
            self._schedule.step(inputs, **masked)
        else:
            self._schedule.step(**masked)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)


def _make_stage(model: Llama, layout: Layout, device: torch.device) -> _Stage:
    """Make this process's stage. Its shapes are given, so stages don't exchange them in the first step."""
    assert layout.mesh is not None
    config, sequence = layout.config, layout.config.train.seq_len
    if layout.tp is not None and layout.tp.sequence:
        sequence //= layout.tp.size
    hidden = torch.empty(
        config.micro_batch_size,
        sequence,
        config.model.hidden_size,
        dtype=model.compute_dtype,
        device="meta",
        requires_grad=True,
    )
    tokens = torch.empty(config.micro_batch_size, config.train.seq_len, dtype=torch.int64, device="meta")
    return _Stage(
        model,
        layout.pp_rank,
        config.parallel.pipeline_parallel_size,
        device,
        input_args=tokens if layout.pp_rank == 0 else hidden,
        output_args=hidden,
        group=layout.mesh["pp"].get_group(),
    )


class _Stage(PipelineStage):
    """A stage that gloo can connect with PyTorch 2.9, which sends 8 bytes where the next stage expects 4."""

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        ops: list[P2POp] = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.to(torch.float32)
        return ops
