"""A tiny model, a run directory for it, and an environment that tests may change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conf.load import dump
from conf.schema import Config, EvalConfig, TrainConfig
from eval import programs
from eval.serving import model, runners
from hlatctl.run.paths import RunPaths
from tests.eval import tiny_data as tiny

if TYPE_CHECKING:
    from eval.serving.hugging_face import HuggingFace

REPO = Path(__file__).resolve().parents[2]
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model of language gives every text a probability.",
    "Question: How many apples are left? Answer: #### 12",
    "def add(a, b):\n    return a + b\n",
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Undo an evaluation's changes of the environment after each test."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HOME", "TQDM_DISABLE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1" if name != "HF_HOME" else str(tmp_path / "huggingface"))


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skip tests of programs where these can't be sandboxed."""
    if (reason := programs.why_unavailable()) is not None:
        pytest.skip(f"no sandbox here: {reason}")


def hugging_face(loaded: model.Loaded, **options: Any) -> HuggingFace:
    """Return a runner of transformers, whose import takes seconds that no collection of tests should."""
    from eval.serving.hugging_face import HuggingFace

    return HuggingFace(loaded, **options)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: a model this small gets slower with more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LlamaForCausalLM and a byte-level BPE tokenizer, in Hugging Face's format."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    lines = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{lines}{{% if add_generation_prompt %}}<assistant>{{% endif %}}")
    return folder


@pytest.fixture(scope="session")
def loaded(model_folder: Path) -> model.Loaded:
    return model.load(model_folder, seq_len=256, device="cpu")


@pytest.fixture(scope="session")
def lm(model_folder: Path, loaded: model.Loaded) -> Any:
    """The harness's model around it."""
    return runners.make(
        "hf",
        runners.RunnerArguments(folder=model_folder, loaded=lambda: loaded, max_length=256, batch_size=4, seed=1234),
    )


@pytest.fixture
def tiny_data(tmp_path: Path) -> Path:
    """A data folder with a few items of each dataset of the whole table."""
    return tiny.write(tmp_path / "data")


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    """Held-out text as JSON Lines."""
    path = tmp_path / "validation.jsonl"
    texts = [" ".join(_SENTENCES[i:] + _SENTENCES[:i]) for i in range(4)] * 6
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def make_run(tmp_path: Path, held_out: Path) -> Callable[..., RunPaths]:
    """Return a function that creates a run directory; its keyword arguments are keys of the section ``eval``."""

    def make(**keys: Any) -> RunPaths:
        run = RunPaths(tmp_path / "run")
        run.root.mkdir(exist_ok=True)
        evaluation = replace(EvalConfig(limit=2, validation_tokens=500), **keys)
        config = Config(runs_dir=str(tmp_path), train=TrainConfig(seq_len=256), eval=evaluation)
        run.config.write_text(dump(config), encoding="utf-8")
        run.dataset.write_text(json.dumps({"validation": {"path": str(held_out)}}), encoding="utf-8")
        return run

    return make


@pytest.fixture
def start_eval(model_folder: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts ``python -m eval`` on a run; further arguments come last."""

    def start(run: RunPaths, *arguments: str, milestone_tokens: int = 1000, step: int = 5) -> subprocess.Popen[str]:
        numbers = f"--milestone-tokens {milestone_tokens} --step {step}".split()
        folders = ["--run-dir", str(run.root), "--model", str(model_folder)]
        command = [sys.executable, "-m", "eval", *folders, *numbers, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": "/nonexistent"}
        return subprocess.Popen(
            command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start
