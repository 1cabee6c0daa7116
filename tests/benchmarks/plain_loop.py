"""The peer: a plain training loop in the style of nanoGPT, on the same model shape and batch.

As an expert in PyTorch would write it: one file, ``nn.Linear`` for each projection, fused attention, BF16 by autocast,
``F.cross_entropy`` over all logits, fused AdamW, ``torch.compile`` of the whole model, DistributedDataParallel for
several processes. Its data are random tokens in memory, so it spends no time on data. Prints its median step
time as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conf.load import load
from conf.schema import ModelConfig

_SKIP_STEPS = 5


class Block(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        width = c.num_kv_heads * c.head_dim
        self.heads, self.kv_heads = c.num_heads, c.num_kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(c.hidden_size), nn.RMSNorm(c.hidden_size)
        self.q = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.k, self.v = (nn.Linear(c.hidden_size, width, bias=False) for _ in range(2))
        self.o = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            f(h).view(b, s, n, -1).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Tokens and targets to the loss."""

    def __init__(self, c: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        angles = torch.outer(torch.arange(seq_len), c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def main() -> None:
    """Train some steps and print ``{"step_s": median}`` on the first process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    config = load(arguments.config)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if arguments.processes > 1:
        dist.init_process_group("gloo")
    device = torch.device(arguments.device)
    plain = Model(config.model, config.train.seq_len).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True)
    model: nn.Module = DistributedDataParallel(plain) if arguments.processes > 1 else plain
    step = torch.compile(model)
    passes = config.grad_accum_steps
    shape = (config.train.global_batch_size // arguments.processes // passes, config.train.seq_len + 1)
    is_mixed = config.precision.name != "fp32"
    times = []
    for _ in range(arguments.steps):
        tokens = torch.randint(config.model.vocab_size, shape, device=device)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(passes):
            with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / passes
            loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - started)
    if arguments.processes == 1 or dist.get_rank() == 0:
        result = {"step_s": statistics.median(times[_SKIP_STEPS:]), "least_s": min(times[_SKIP_STEPS:])}
        if device.type == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
        print(json.dumps(result))
    if arguments.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
