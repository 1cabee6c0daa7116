"""One process reads, the others of its replica receive: equal batches, equal errors, and no waiting for the lost."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.schema import Config, DataConfig, TrainConfig
from hlatctl.run.errors import DataError, LaunchError
from trainer.data.encoder import Tokens
from trainer.data.loader import Loader
from trainer.data.prefetch import Batch, NoBatches
from trainer.data.relay import ReceivedBatches, Sender

_SHAPE = (2, 33)
_CONFIG = Config(
    seed=1, train=TrainConfig(global_batch_size=2, seq_len=32), data=DataConfig(prefetch_batches=2, skip_steps=[2, 5])
)


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path, short enough whatever pytest's folder is."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "batches"


@pytest.fixture
def received(path: Path) -> Iterator[list[ReceivedBatches]]:
    """Two processes' received batches."""
    each = [ReceivedBatches(path, _SHAPE, ahead=2) for _ in range(2)]
    yield each
    for batches in each:
        batches.close()


def test_receivers_get_the_readers_batches_bit_by_bit(
    path: Path, received: list[ReceivedBatches], dataset: Path
) -> None:
    description = json.loads(dataset.read_text())
    alone = Loader(_CONFIG, description, rank=0, size=1)
    reader = Loader(_CONFIG, description, rank=0, size=1, sender=Sender(path, 2))
    try:
        for _ in range(40):
            expected = alone.next()
            for batches in (reader, *received):
                assert all(map(torch.equal, batches.next(), expected))
                assert batches.batch == alone.batch
        assert alone.batch == 42, "two batches are skipped"
        assert reader.state == alone.state
        assert [batches.state for batches in received] == [[], []]
        assert not path.exists(), "nobody else can connect"
    finally:
        reader.close()
        alone.close()


def test_an_error_while_reading_is_the_same_error_everywhere(
    path: Path, received: list[ReceivedBatches], dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> list[int]:
        raise DataError("the tokenizer broke", hint="mend it")

    monkeypatch.setattr("trainer.data.loader.make_encoder", lambda tokenizer: broken)
    reader = Loader(_CONFIG, json.loads(dataset.read_text()), rank=0, size=1, sender=Sender(path, 2))
    for batches in (reader, *received):
        with pytest.raises(DataError, match="the tokenizer broke") as caught:
            batches.next()
        assert caught.value.hint == "mend it"
    reader.close()


def test_an_error_at_the_start_reaches_the_receivers(path: Path, received: list[ReceivedBatches]) -> None:
    sender = Sender(path, 2)
    sender.fail(DataError("there is no corpus"))
    sender.close()
    for batches in received:
        with pytest.raises(DataError, match="there is no corpus"):
            batches.next()


def test_a_lost_reader_is_an_error_after_what_it_has_sent(path: Path, received: list[ReceivedBatches]) -> None:
    tokens: Tokens = np.arange(66, dtype=np.int32).reshape(_SHAPE)
    sender = Sender(path, 2)
    sender.send(Batch(tokens, 1))
    sender.close()
    for batches in received:
        assert batches.next()[1][1, -1] == 65
        with pytest.raises(ConnectionError, match=r"^Connection closed by peer: the process that reads"):
            batches.next()


@pytest.mark.parametrize("receivers_come", [False, True])
def test_a_reader_that_waits_for_its_receivers_can_be_closed(path: Path, dataset: Path, receivers_come: bool) -> None:
    """It waits until they connect, or until the slowest has room for more than a socket holds."""
    length = 1 << 16
    config = Config(train=TrainConfig(global_batch_size=1, seq_len=length), data=DataConfig(prefetch_batches=1))
    reader = Loader(config, json.loads(dataset.read_text()), rank=0, size=1, sender=Sender(path, 2))
    slow = [ReceivedBatches(path, (1, length + 1), ahead=1) for _ in range(2 if receivers_come else 0)]
    reader.next()
    for batches in slow:
        batches.next()
    for _ in range(2 if receivers_come else 0):  # the receivers queue one and hold one: the next one waits
        reader.next()
    reader.close()
    for batches in slow:
        batches.close()
    assert not path.exists()


def test_a_receiver_without_a_reader_can_be_closed(path: Path) -> None:
    ReceivedBatches(path, _SHAPE, ahead=1).close()


def test_receivers_come_to_the_new_reader_after_one_that_died(path: Path) -> None:
    dead = Sender(path, 1)
    dead._listener.close()
    assert path.exists()
    batches = ReceivedBatches(path, _SHAPE, ahead=1)
    sender = Sender(path, 1)
    sender.send(Batch(np.zeros(_SHAPE, dtype=np.int32), 7))
    batches.next()
    assert batches.batch == 7
    batches.close()
    sender.close()


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_a_way_out() -> None:
    long = Path("/tmp") / ("x" * 120) / "batches"
    for make in (lambda: Sender(long, 1), lambda: ReceivedBatches(long, _SHAPE, ahead=1)):
        with pytest.raises(LaunchError, match="a socket's path has at most 103 bytes") as caught:
            make()
        assert "TMPDIR" in caught.value.hint


def test_a_stage_without_need_of_tokens_gets_zeros_of_the_right_shape() -> None:
    batches = NoBatches((2, 32))
    assert [part.shape for part in batches.next()] == [(2, 32)] * 2
    assert batches.state == []
    batches.close()
