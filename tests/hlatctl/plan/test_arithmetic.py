"""Counts against hand-calculated ones."""

from __future__ import annotations

from conf.schema import CheckpointConfig, Config, EvalConfig, ModelConfig, PrecisionConfig, TrainConfig
from hlatctl.plan.arithmetic import budget, checkpoint_bytes, checkpoints_kept, flops_per_token, parameters

LLAMA_7B = ModelConfig(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32, num_heads=32, num_kv_heads=32
)
LLAMA2_70B = ModelConfig(
    vocab_size=32_000, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, num_kv_heads=8
)


def test_parameters_of_the_published_shapes() -> None:
    assert parameters(LLAMA_7B).total == 6_738_415_616
    assert parameters(LLAMA2_70B).total == 68_976_648_192


def test_parameters_of_a_model_small_enough_to_add_up_by_hand() -> None:
    model = ModelConfig(vocab_size=10, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2)
    counts = parameters(model)
    assert (counts.embedding, counts.lm_head) == (80, 80)
    assert counts.attention == 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8)
    assert counts.feed_forward == 2 * 3 * 8 * 12
    assert counts.norms == 5 * 8


def test_flops_per_token_of_7b() -> None:
    # 6 x (6,738,415,616 - 32,000 x 4,096) + 12 x 32 x 4,096 x 4,096
    assert flops_per_token(LLAMA_7B, 4096) == 39_644_061_696 + 6_442_450_944


def test_a_checkpoint_holds_weights_and_two_moments() -> None:
    assert checkpoint_bytes(Config(model=LLAMA_7B)) == 3 * 4 * 6_738_415_616
    assert checkpoint_bytes(Config(model=LLAMA_7B, precision=PrecisionConfig(name="bf16_sr"))) == 3 * 2 * 6_738_415_616


def test_checkpoints_of_milestones_are_kept_besides_the_newest() -> None:
    config = Config(
        train=TrainConfig(tokens=1000, global_batch_size=1, seq_len=1),
        checkpoint=CheckpointConfig(every_steps=100, keep=3),
        eval=EvalConfig(every_tokens=250),
    )
    # Written: every 100th and 250, 500, 750, 1000. Kept: 800, 900, 1000 and 250, 500, 750.
    assert checkpoints_kept(config) == 6
    assert budget(config).disk_bytes == 7 * checkpoint_bytes(config)
