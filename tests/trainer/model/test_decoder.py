"""The model, its loss and its optimizer, compared with PyTorch's implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from conf.compose import compose
from conf.schema import ModelConfig, OptimizerConfig
from conf.sizes import parameters
from trainer.model import decoder as llama
from trainer.model.decoder import Llama
from trainer.model.initial import build, initialize
from trainer.model.loss import cross_entropy
from trainer.optim.adamw import AdamW, ParameterShard, clip_divisor

_SMALL = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2)


def test_hidden_states_do_not_depend_on_later_tokens() -> None:
    model = build(_SMALL, seq_len=16, seed=0)
    tokens = torch.randint(97, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize(
    "config",
    [
        _SMALL,
        ModelConfig(),
        replace(_SMALL, head_dim=10, qk_norm="head"),
        replace(_SMALL, head_dim=10, qk_norm="all", norm_position="post"),
    ],
)
def test_parameters_are_counted_without_making_them(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = llama.Llama(config, 8)
    assert parameters(config).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama_1b", 1_100_048_384),
        ("llama_7b", 6_738_415_616),
        ("llama_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama31_8b", 8_030_261_248),
        ("llama32_1b", 1_235_814_400),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_1_7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("olmo2_1b", 1_484_916_736),
        ("olmo2_7b", 7_298_617_344),
    ],
)
def test_known_shapes_have_the_parameters_of_the_published_models(name: str, published: int) -> None:
    assert parameters(compose([f"model={name}"]).model).total == published


@pytest.mark.parametrize("rows", [1, 511, 512, 1300])
def test_fused_loss_and_gradients_equal_the_plain_ones(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (rows,), generator=generator)
    plain = F.cross_entropy(hidden @ weight.T, targets)
    expected = torch.autograd.grad(plain, (hidden, weight))
    fused = cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(torch.autograd.grad(fused * 3, (hidden, weight)), tuple(3 * g for g in expected))


def test_a_bf16_weight_s_gradient_adds_up_blocks_of_the_loss_in_fp32() -> None:
    """Each of 64 blocks of two rows adds as much: in BF16 the sum would end before the last ones."""
    vocabulary, rows = 1 << 19, 128
    weight = torch.zeros(vocabulary, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    hidden[0] = 512  # the target's gradient is the sum of the rows, apart from a 2**-19 of it
    cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad[0].item() * rows == pytest.approx(-(512 + rows - 1), rel=2**-8)


def test_optimizer_updates_like_pytorchs() -> None:
    config = OptimizerConfig()
    flat_model, plain_model = (build(_SMALL, seq_len=8, seed=0) for _ in range(2))
    flat = AdamW(
        {name: ParameterShard(parameter=parameter) for name, parameter in flat_model.named_parameters()}, config
    )
    plain = torch.optim.AdamW(plain_model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    tokens = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(0))
    for step in range(1, 4):
        flat.zero_grad()
        plain.zero_grad()
        for model in (flat_model, plain_model):
            cross_entropy(model(tokens), model.output_weight, tokens).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        assert flat.squared_norms()[0].sqrt().item() == pytest.approx(norm.item(), rel=1e-5)
        plain.param_groups[0]["lr"] = step * 1e-3
        plain.step()
        flat.step(lr=step * 1e-3, number=step, divisor=clip_divisor(norm.square(), 1.0))
    pairs: Any = zip(flat_model.parameters(), plain_model.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert flat.step_count == 3


@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_z_loss_enters_the_gradients_and_not_the_value(z_loss: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (40,), generator=generator)
    logits = hidden @ weight.T
    plain = F.cross_entropy(logits, targets)
    whole = plain + z_loss * logits.logsumexp(-1).square().mean()
    fused = cross_entropy(hidden, weight, targets, z_loss=z_loss)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(
        torch.autograd.grad(fused, (hidden, weight)), torch.autograd.grad(whole, (hidden, weight))
    )


def test_loss_of_bfloat16_states_is_computed_in_fp32_and_the_gradient_of_fp32_weights_stays_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(50, 16, generator=generator).requires_grad_()
    targets = torch.randint(50, (300,), generator=generator)
    logits = (hidden @ weight.bfloat16().T).float()
    fused = cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(fused, F.cross_entropy(logits, targets))
    grad_hidden, grad_weight = torch.autograd.grad(fused, (hidden, weight))
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    exact = torch.autograd.grad(F.cross_entropy(hidden.float() @ weight.T, targets), weight)[0]
    torch.testing.assert_close(grad_weight, exact, rtol=0.05, atol=2e-4)


def test_masked_documents_give_the_same_states_as_alone() -> None:
    """Rotary positions are relative, so a document's position in the sequence doesn't matter."""
    model = Llama(_SMALL, 16, document_end_id=7)
    initialize(model, _SMALL, 0)
    first, second = torch.tensor([[3, 4, 5, 7]]), torch.tensor([[9, 8, 3, 2, 1]])
    with torch.no_grad():
        together = model(torch.cat((first, second), dim=1))
        torch.testing.assert_close(together[:, :4], model(first))
        torch.testing.assert_close(together[:, 4:], model(second))
        unmasked = build(_SMALL, seq_len=16, seed=0)(torch.cat((first, second), dim=1))
    assert not torch.allclose(together[:, 4:], unmasked[:, 4:], atol=1e-3)


def test_tied_embedding_is_the_output_projection() -> None:
    tied = replace(_SMALL, tie_embeddings=True)
    model = build(tied, seq_len=8, seed=0)
    assert model.output_weight is model.embedding.weight  # type: ignore[union-attr]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters(tied).total


@pytest.mark.parametrize("recompute", ["recompute", "recompute_core"])
def test_recomputation_changes_no_gradient(recompute: str) -> None:
    tokens = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(0))
    gradients = []
    for kept in (True, False):
        model = build(_SMALL, seq_len=8, seed=0)
        for block in model.blocks():
            setattr(block if recompute == "recompute" else block.attention, recompute, not kept)
        cross_entropy(model(tokens), model.output_weight, tokens).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own, hidden
@pytest.mark.parametrize("recompute", ["recompute", "recompute_core"])
def test_compiled_layers_learn_from_masked_documents_and_need_one_graph(recompute: str) -> None:
    gradients = []
    for compiles in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = Llama(_SMALL, 64, document_end_id=7)
        initialize(model, _SMALL, 0)
        for block in model.blocks():
            setattr(block if recompute == "recompute" else block.attention, recompute, True)
            if compiles:
                block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")  # type: ignore[method-assign]
        for seed in range(3):
            tokens = torch.randint(30, (2, 64), generator=torch.Generator().manual_seed(seed))
            model(tokens).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert counters["stats"]["unique_graphs"] == 1, "other documents need no other graph"
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_is_on_the_device_of_the_tokens() -> None:
    assert llama.document_mask(torch.empty((1, 8), dtype=torch.int64, device="meta"), 7).device.type == "meta"
