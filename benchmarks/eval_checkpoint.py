"""A checkpoint evaluated through an exported copy of its weights, and read directly: bytes, seconds, memory.

A random model of 374 M parameters in FP32, with one moment, in a checkpoint of two ranks. Each step runs in a process
of its own, as in an evaluation: first the folder for the runner, which verifies the checkpoint, then a process that
loads it and computes a batch. The ways alternate. The checkpoint is in the page cache.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conf.schema import ModelConfig
from hlatctl.run.paths import RunPaths

_SHAPE = ModelConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_layers=24, num_heads=16, num_kv_heads=16
)
_WAYS: dict[str, list[str]] = {"export": [], "direct": ["--link", "only"]}
_ROUNDS, _TOKENS = 2, 128


def run() -> None:
    """Print the figures of the faster round of each way, and whether both logits have the same bits."""
    from tests.sharded_checkpoint import write_run

    best: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        tokenizer = Path(folder, "tokenizer")
        _write_tokenizer(tokenizer)
        made = write_run(Path(folder, "run"), tokenizer, model=_SHAPE)
        for number in range(_ROUNDS):
            for way, flags in _WAYS.items():
                measured = _measure(made, Path(folder, f"{way}-{number}"), flags)
                best[way] = min(best.get(way, measured), measured, key=lambda one: float(one["all_s"]))
    for way, one in best.items():
        print(
            f"{way}: {one['written_bytes'] / 2**20:,.2f} MiB written; folder {one['folder_s']:.1f} s, first batch "
            f"{one['batch_s']:.1f} s later, together {one['all_s']:.1f} s; peak memory "
            f"{one['peak_bytes'] / 2**20:,.0f} MiB, of the reader {one['reader_bytes'] / 2**20:,.0f} MiB"
        )
    print(f"logits equal bit for bit: {len({one['logits'] for one in best.values()}) == 1}")


def _measure(made: RunPaths, folder: Path, flags: list[str]) -> dict[str, Any]:
    started = time.monotonic()
    places = ["--run-dir", os.fspath(made.root), "--step", "5", "--to", os.fspath(folder)]
    subprocess.run([sys.executable, "-m", "trainer.convert.export", *places, *flags], check=True, capture_output=True)
    folder_s = time.monotonic() - started
    command = [sys.executable, "-m", __name__, os.fspath(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "TQDM_DISABLE": "1"})
    all_s = time.monotonic() - started
    written = sum(path.stat().st_size for path in folder.iterdir())
    measured = json.loads(done.stdout.splitlines()[-1])
    return {**measured, "written_bytes": written, "folder_s": folder_s, "batch_s": all_s - folder_s, "all_s": all_s}


def _case(folder: Path) -> dict[str, Any]:
    import hashlib

    import torch

    from eval.serving import model

    loaded = model.load(folder, seq_len=_TOKENS, device="cpu")
    with torch.no_grad():
        logits = loaded.model(torch.arange(_TOKENS).view(1, -1)).logits
    peaks = {
        name: resource.getrusage(who).ru_maxrss * 1024
        for name, who in (("peak_bytes", resource.RUSAGE_SELF), ("reader_bytes", resource.RUSAGE_CHILDREN))
    }
    return {**peaks, "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest()}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *sorted(alphabet)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)


if __name__ == "__main__":
    print(json.dumps(_case(Path(sys.argv[1]))))
