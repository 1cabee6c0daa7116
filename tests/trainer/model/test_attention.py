"""Masks of blocks, compared with dense ones: which tokens they show, and attention with them, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore

from conf.schema import ModelConfig
from tests.trainer.flex_on_cpu import allow_gradients
from trainer.model.attention import BLOCK, ContextParallel, document_numbers, make_mask
from trainer.model.decoder import Llama, initialize

_GROUPED = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2)
_END = 7


def documents_of(seq_len: int, *, seed: int = 0, share: float = 0.01) -> Tensor:
    """Documents of two sequences; a token ends one with this probability."""
    ends = torch.rand(2, seq_len, generator=torch.Generator().manual_seed(seed)) < share
    return document_numbers(ends.long(), 1)


def shown(mask: BlockMask) -> Tensor:
    """What a kernel shows that trusts the lists of blocks (batch, queries, keys)."""
    queries, keys = mask.seq_lengths
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    partial, full = (
        _expanded(counts[:, 0], indices[:, 0])[:, :queries, :keys]
        for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    )
    assert not (partial & full).any(), "each block is listed once"
    places = torch.meshgrid(torch.arange(2), torch.arange(queries), torch.arange(keys), indexing="ij")
    return full | partial & mask.mask_mod(places[0], torch.tensor(0), places[1], places[2])


def _expanded(counts: Tensor, indices: Tensor) -> Tensor:
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    blocks = torch.zeros_like(listed).scatter(-1, indices.long(), listed)
    return blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


@pytest.mark.parametrize("share", [0.0, 0.002, 0.01, 0.3])
@pytest.mark.parametrize("seq_len", [32, 384, 600])
def test_blocks_show_the_tokens_that_a_dense_mask_shows(seq_len: int, share: float) -> None:
    documents, positions = documents_of(seq_len, share=share), torch.arange(seq_len)
    blocks, dense = (make_mask(documents, positions, blocks=blocks) for blocks in (True, False))
    assert isinstance(blocks, BlockMask)
    assert isinstance(dense, Tensor)
    assert torch.equal(shown(blocks), dense[:, 0])
    expected = create_block_mask(blocks.mask_mod, 2, None, seq_len, seq_len, device="cpu")
    assert torch.equal(blocks.to_dense(), expected.to_dense()), "no block is listed in vain"
    assert blocks.full_kv_num_blocks is not None
    assert expected.full_kv_num_blocks is not None
    assert torch.equal(blocks.full_kv_num_blocks, expected.full_kv_num_blocks)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seq_len", [64, 600, 2048])
def test_each_context_parallel_process_sees_its_rows_of_the_mask(seq_len: int, size: int) -> None:
    """Also if the front and the back chunk of a process share a block."""
    group: Any = None
    documents = documents_of(seq_len, share=0.002)
    whole = make_mask(documents, torch.arange(seq_len), blocks=False)
    assert isinstance(whole, Tensor)
    seen, work = [], []
    for rank in range(size):
        positions = ContextParallel(group, rank, size).positions(seq_len, torch.device("cpu"))
        blocks = make_mask(documents, positions, blocks=True)
        assert isinstance(blocks, BlockMask)
        assert torch.equal(shown(blocks), whole[:, 0, positions])
        causal = make_mask(torch.zeros_like(documents), positions, blocks=False)
        assert isinstance(causal, Tensor)
        work.append(int(causal.sum()))
        seen.append(positions)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(seq_len))
    assert len(set(work)) == 1, "all do the same work"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own, hidden
@pytest.mark.parametrize("recompute", ["", "recompute", "recompute_core"])
def test_a_compiled_model_learns_alike_with_either_mask_and_is_compiled_once(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads share keys and values. FlexAttention has no gradients on a CPU, unless it is asked not to refuse them."""
    allow_gradients(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    graphs, results = [], []
    for flex in (True, False):
        model = Llama(_GROUPED, 200, document_end_id=_END)
        initialize(model, _GROUPED, 0)
        model.uses_flex_attention = flex
        for block in model.blocks():
            if recompute:
                setattr(block if recompute == "recompute" else block.attention, recompute, True)
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")  # type: ignore[method-assign]
        for seed in range(3):
            tokens = torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(seed))
            states = model(tokens)
            states.square().mean().backward()
            results.append(states.detach())
        graphs.append(counters["stats"]["unique_graphs"])
        results += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert graphs[0] == 1, "other documents need no other graph"
    half = len(results) // 2
    for ours, expected in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def group_of_8() -> Iterator[dist.ProcessGroup]:
    """A process group whose other members do not exist, so its collectives return immediately."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=1, num_heads=32, num_kv_heads=8
)
_LONG = 131_072


def traced(cp: ContextParallel | None) -> tuple[Llama, Tensor, int]:
    """A layer of Llama 3 8B and its output for one long sequence, without memory, and the bytes that it would keep."""
    with torch.device("meta"):
        model = Llama(_8B, _LONG, compute_dtype=torch.bfloat16, cp=cp, document_end_id=_END).bfloat16()
    next(model.blocks()).attention.recompute_core = True
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model(torch.empty((1, _LONG), dtype=torch.int64, device="meta"))
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    mask_bytes = _LONG**2 // (cp.size if cp else 1)
    return model, states, sum(size for size in kept.values() if size != mask_bytes)


def test_a_process_keeps_its_part_of_a_long_sequence_and_everything_on_its_device(
    group_of_8: dist.ProcessGroup,
) -> None:
    """The keys and values of the whole sequence are not kept: attention's core is recomputed."""
    _, whole, whole_bytes = traced(None)
    cp = ContextParallel(group_of_8, 3, 8)
    model, states, kept_bytes = traced(cp)
    assert whole.shape == (1, _LONG, 4096)
    assert states.shape == (1, _LONG // 8, 4096)
    assert kept_bytes == pytest.approx(whole_bytes / 8, rel=0.01)
    states.backward(torch.empty_like(states))  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name != "head.weight")
    print(f"kept by a layer: {whole_bytes >> 20:,} MiB, by one of 8 processes {kept_bytes >> 20:,} MiB")


@pytest.mark.parametrize(("seq_len", "size"), [(8192, 1), (_LONG, 1), (_LONG, 8)])
def test_a_mask_of_blocks_is_small_and_on_the_device_of_the_tokens(seq_len: int, size: int) -> None:
    group: Any = None
    documents = torch.empty((1, seq_len), dtype=torch.int64, device="meta")
    positions = ContextParallel(group, 0, size).positions(seq_len, documents.device)
    mask, dense = (make_mask(documents, positions, blocks=blocks) for blocks in (True, False))
    assert isinstance(mask, BlockMask)
    assert isinstance(dense, Tensor)
    assert mask.seq_lengths == (seq_len // size, seq_len)
    tensors = [tensor for tensor in mask.as_tuple() if isinstance(tensor, Tensor)]
    assert {tensor.device.type for tensor in (dense, *tensors)} == {"meta"}
    kept_bytes = sum(tensor.nbytes for tensor in tensors)
    assert dense.nbytes > 900 * kept_bytes
    print(f"{seq_len:,} tokens, 1 of {size}: dense {dense.nbytes >> 20:,} MiB, blocks {kept_bytes / 2**20:.2f} MiB")
