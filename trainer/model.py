"""The LLaMA-family decoder: its layers and its initial weights. No loss, no optimizer, no devices.

Query, key and value are one linear layer, and so are gate and up: the same input, one larger product
(HLAT, arXiv 2404.10630, section 3.2). The causal mask is never a tensor.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=False)
        self.o = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        batch, seq, _ = x.shape
        heads = self.qkv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v,
            is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads,
        )  # fmt: skip
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The whole decoder; ``head`` (untied) turns its output into logits.

    Args:
        config: the shape.
        seq_len: longest sequence, in tokens.
    """

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rotary_tables(seq_len, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, seq) to the normalised hidden states (batch, seq, hidden) that ``head`` reads."""
        seq = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:seq], self.get_buffer("sin")[:seq]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


def rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seq, head_dim) of the rotary embedding, halves repeated (RoFormer, arXiv 2104.09864)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to (batch, heads, seq, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def build(config: ModelConfig, *, seq_len: int, seed: int) -> Llama:
    """A model with its initial weights, on the CPU."""
    model = Llama(config, seq_len)
    initialize(model, config, seed)
    return model


@torch.no_grad()
def initialize(model: Llama, config: ModelConfig, seed: int) -> None:
    """Normal weights of ``initializer_range``; norms 1; the two projections back into the residual stream scaled down.

    Their standard deviation is divided by sqrt(2 l), l the 1-based layer (HLAT, section 3.3). Each parameter is drawn
    from (seed, its name) alone, so the same weights come out whatever else the process holds or drew before.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        std = config.initializer_range
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        parameter.normal_(0.0, std, generator=generator)


def count_parameters(config: ModelConfig) -> int:
    """Parameters of a model, by arithmetic alone."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    layer = attention + mlp + 2 * config.hidden_size
    return 2 * config.vocab_size * config.hidden_size + config.num_layers * layer + config.hidden_size
