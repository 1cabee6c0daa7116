"""Copies of a model in other processes give the scores of one process, and a lost one is named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.sampling import Sampling
from eval import generate, harness, validation
from eval.serving import model
from eval.serving.model import Loaded
from eval.serving.pool import Pool, Settings
from hlatctl.run import processes
from hlatctl.run.errors import EvaluationError
from tests.waiting import WAIT_S

pytestmark = pytest.mark.processes

_BATCH_SIZE = 2
_TEXTS = (
    "A model of language",
    "The quick brown fox",
    "Question: How many",
    "def add",
    "Answer:",
    "jumps over the dog",
)


#: In the second process of a copy, memory is exhausted by more than three rows; then the first waits for it in a sum.
_SMALL_SECOND = """
import os
from eval.serving import scoring
whole = scoring.score
def score(model, rows, **options):
    if os.environ.get("RANK") == "1" and len(rows) > 3:
        raise RuntimeError("CUDA out of memory")
    return whole(model, rows, **options)
scoring.score = score
"""


def _settings(folder: Path, count: int, **keys: Any) -> Settings:
    usual = {"max_length": 256, "device": "cpu", "dtype": "float32", "batch_size": _BATCH_SIZE}
    return Settings(folder=str(folder), processes=count, **{**usual, **keys})


def _start(folder: Path, scratch: Path, replicas: int, size: int, **keys: Any) -> Iterator[Pool]:
    settings = _settings(folder, replicas * size, **keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as in this process: sums of several threads may be rounded otherwise
        patch.setenv("PYTHONPATH", str(scratch))
        pool = Pool(settings, replicas=replicas, tensor_parallel_size=size, scratch=scratch)
        yield pool
        pool.close()


@pytest.fixture(scope="module")
def replicas(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two copies of one process each."""
    yield from _start(model_folder, tmp_path_factory.mktemp("replicas"), 2, 1)


@pytest.fixture(scope="module")
def shared(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One copy of two processes, of which one has little memory."""
    scratch = tmp_path_factory.mktemp("shared")
    (scratch / "sitecustomize.py").write_text(_SMALL_SECOND)
    yield from _start(model_folder, scratch, 1, 2, batch_size="auto")


def _models(folder: Path, loaded: Loaded, pool: Pool) -> tuple[Any, Any]:
    one = harness.wrap(loaded, batch_size=_BATCH_SIZE)
    return one, harness.wrap(model.describe(folder, seq_len=256), batch_size=_BATCH_SIZE, pool=pool)


def _likelihoods() -> list[Any]:
    return [SimpleNamespace(args=(text, end)) for text in _TEXTS for end in (" is here", " lazy", " lazier cat")]


def _generations(**keys: Any) -> list[Any]:
    settings = {"until": ["\n"], "max_gen_toks": 6, **keys}
    return [SimpleNamespace(args=(text, settings)) for text in _TEXTS]


def test_scores_and_answers_equal_those_of_one_process(model_folder: Path, loaded: Loaded, replicas: Pool) -> None:
    one, several = _models(model_folder, loaded, replicas)
    assert several.loglikelihood(_likelihoods()) == one.loglikelihood(_likelihoods())
    texts = [SimpleNamespace(args=(text * 40,)) for text in _TEXTS[:3]]
    assert several.loglikelihood_rolling(texts) == one.loglikelihood_rolling(texts)
    assert several.generate_until(_generations()) == one.generate_until(_generations())


def test_all_requests_that_are_asked_for_together_occupy_every_copy(
    model_folder: Path, loaded: Loaded, replicas: Pool
) -> None:
    one, several = _models(model_folder, loaded, replicas)
    assert one.requests_at_once == _BATCH_SIZE
    assert several.requests_at_once >= 2 * _BATCH_SIZE


def test_sampled_answers_depend_on_the_seed_and_not_on_the_copy(
    model_folder: Path, loaded: Loaded, replicas: Pool
) -> None:
    import torch

    _, several = _models(model_folder, loaded, replicas)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(several.generate_until(_generations(do_sample=True, temperature=2.0)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_loss_and_the_continuations_equal_those_of_one_process(
    held_out: Path, loaded: Loaded, replicas: Pool
) -> None:
    def losses(batches: list[validation.Windows]) -> Iterator[list[float]]:
        return replicas.map("losses", ({"windows": batch} for batch in batches))

    expected = validation.evaluate(loaded, held_out, max_tokens=600)
    assert validation.evaluate(loaded, held_out, max_tokens=600, losses=losses) == expected
    sampling = {"temperature": 0, "max_new_tokens": 5}
    text = generate.generate(loaded, [0, 5, 6], Sampling(**sampling))
    assert generate.Text(**replicas.ask("continue_prompt", ids=[0, 5, 6], sampling=sampling)) == text


def test_processes_that_share_a_model_give_its_scores_up_to_rounding(
    model_folder: Path, loaded: Loaded, shared: Pool
) -> None:
    one, several = _models(model_folder, loaded, shared)
    expected, actual = one.loglikelihood(_likelihoods()), several.loglikelihood(_likelihoods())
    assert [is_greedy for _, is_greedy in actual] == [is_greedy for _, is_greedy in expected]
    assert [nats for nats, _ in actual] == pytest.approx([nats for nats, _ in expected], rel=0, abs=5e-5)
    assert several.generate_until(_generations()) == one.generate_until(_generations())


def test_a_copy_starts_again_with_smaller_batches_after_memory_was_exhausted(
    model_folder: Path, loaded: Loaded, shared: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    several = harness.wrap(model.describe(model_folder, seq_len=256), batch_size="auto", pool=shared)
    one, requests = harness.wrap(loaded, batch_size="auto"), _likelihoods()[:5]
    actual, expected = several.loglikelihood(requests), one.loglikelihood(requests)
    assert capfd.readouterr().err.count("replica 0: memory is exhausted; started again with smaller batches") == 1
    assert [nats for nats, _ in actual] == pytest.approx([nats for nats, _ in expected], rel=0, abs=5e-5)
    assert several.generate_until(_generations()) == one.generate_until(_generations())


def test_a_killed_process_is_named_and_the_others_end(model_folder: Path, shared: Pool) -> None:
    below = map(processes.identify, processes.descendants(os.getpid()))
    workers = [one for one in below if one and "/shared0/" in " ".join(processes.command_line(one.pid))]
    assert len(workers) == 2
    assert processes.send(workers[1], signal.SIGKILL)
    with pytest.raises(EvaluationError, match=r"replica 0: process \d+ has ended"):
        list(shared.map("losses", [{"windows": [[1, 2, 3]]}] * 3))
    assert not any(map(processes.alive, workers))


def test_an_error_of_a_process_keeps_its_message_and_hint(model_folder: Path, tmp_path: Path) -> None:
    settings = _settings(tmp_path / "none", 1)
    with pytest.raises(EvaluationError) as caught:
        Pool(settings, replicas=1, tensor_parallel_size=1, scratch=tmp_path)
    assert "none: no such folder\nhint: python -m trainer.convert.export" in str(caught.value)


def test_heads_that_can_not_be_shared_are_refused(model_folder: Path) -> None:
    model.check_heads(model_folder, 2)
    with pytest.raises(EvaluationError) as caught:
        model.check_heads(model_folder, 4)
    assert str(caught.value) == (
        "eval.tensor_parallel_size=4: does not divide the model's 2 key-value heads\nhint: use a divisor of 2"
    )


def test_copies_load_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=WAIT_S)
    copy = SimpleNamespace(load=both.wait, close=lambda: None)
    monkeypatch.setattr("eval.serving.pool._Copy", lambda *arguments: copy)
    Pool(_settings(tmp_path, 2), replicas=2, tensor_parallel_size=1, scratch=tmp_path).close()
    assert not both.broken
