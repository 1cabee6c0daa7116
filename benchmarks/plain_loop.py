"""The peer: a plain training loop in the style of nanoGPT, on the same model shape and batch.

As an expert in PyTorch would write it: one file, ``nn.Linear`` for each projection, fused attention, BF16 by autocast,
``F.cross_entropy`` over all logits, fused AdamW, ``torch.compile`` of the whole model, DistributedDataParallel for
several processes. Its tokens are in the device's memory, so it spends no time on data, and the host never waits for
the device. Prints what it measured as JSON.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import peers
from conf.load import load
from conf.schema import ModelConfig


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        width = c.num_kv_heads * c.head_width
        self.heads, self.kv_heads = c.num_heads, c.num_kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(c.hidden_size), nn.RMSNorm(c.hidden_size)
        self.q = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.k, self.v = (nn.Linear(c.hidden_size, width, bias=False) for _ in range(2))
        self.o = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
    def __init__(self, c: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        angles = torch.outer(torch.arange(seq_len), c.rope_theta ** (-torch.arange(0, c.head_width, 2) / c.head_width))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def main() -> None:
    """Train some steps and print what was measured, on the first process."""
    given = peers.arguments().parse_args()
    config = load(given.config)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if given.processes > 1:
        dist.init_process_group("gloo")
    device = torch.device(given.device)
    with device:  # drawing 1 B numbers on the host takes 10 s
        plain = Model(config.model, config.train.seq_len)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True)
    model: nn.Module = DistributedDataParallel(plain) if given.processes > 1 else plain
    step = torch.compile(model) if config.backend.compile else model
    is_mixed = config.precision.name != "fp32"
    batches = peers.micro_batches(config, given, device)
    times = peers.StepTimes(device)
    for parts in batches:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for tokens in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / len(parts)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(plain.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        times.end_step()
    if given.processes == 1 or dist.get_rank() == 0:
        peers.report(plain, times, device, total)
    if given.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
