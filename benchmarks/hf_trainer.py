"""The peer: Hugging Face ``Trainer`` on the same model shape and batch; prints its step times as JSON.

Its data are random tokens in memory, so it spends no time on data.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from conf.load import load


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())


def main() -> None:
    """Train some steps and print ``{"steps_s": [...]}`` on the first process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    arguments = parser.parse_args()
    config = load(arguments.config)
    model, train = config.model, config.train
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            max_position_embeddings=train.seq_len,
        )
    )
    tokens = torch.randint(model.vocab_size, (arguments.steps * train.global_batch_size, train.seq_len))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            use_cpu=config.backend.device == "cpu",
            report_to=[],
            per_device_train_batch_size=train.global_batch_size // arguments.processes,
            save_strategy="no",
            learning_rate=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.max_grad_norm,
            adam_beta2=config.optimizer.beta2,
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = Trainer(model=network, args=settings, train_dataset=rows, callbacks=[clock])
        trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps({"steps_s": [b - a for a, b in pairwise(clock.ends_s)]}))


if __name__ == "__main__":
    main()
