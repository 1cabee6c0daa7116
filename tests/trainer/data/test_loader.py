"""One process reads, the others of its replica receive: equal batches, equal errors, and no waiting for the lost."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.data_changes import SKIP_STEPS
from conf.schema import Config, DataConfig, SourceConfig, StageConfig, TrainConfig
from hlatctl.run.errors import CheckpointError, DataError, LaunchError
from trainer.data.loader import Batch, Loader, NoBatches, ReceivedBatches, Sender, State, mixed_anew
from trainer.data.packing import Deal, PackedRow, Permutation, Position
from trainer.data.tokenizer import Tokens

MakeLoader = Callable[..., Loader]


@pytest.fixture
def make_loader(dataset: Path) -> Iterator[MakeLoader]:
    opened: list[Loader] = []

    def make(
        *, rows: int = 2, seq_len: int = 32, skip: Sequence[int] = (), rank: int = 0, size: int = 1, state: Any = None
    ) -> Loader:
        train = TrainConfig(global_batch_size=rows, seq_len=seq_len)
        config = Config(seed=1, train=train, data=DataConfig(prefetch_batches=3, skip_steps=[*skip]))
        opened.append(Loader(config, json.loads(dataset.read_text()), rank=rank, size=size, state=state))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def sources_of(dataset: dict[str, Any], *weights: float) -> list[SourceConfig]:
    return [SourceConfig(path=s["path"], weight=w) for s, w in zip(dataset["sources"], weights, strict=True)]


def test_targets_are_the_inputs_one_token_later(make_loader: MakeLoader) -> None:
    loader = make_loader()
    inputs, targets = loader.next()
    assert (inputs.shape, inputs.dtype) == ((2, 32), torch.int64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets[:, -1], loader.next()[0][:, 0])


def test_ranks_share_out_the_sequences_that_one_process_would_take(make_loader: MakeLoader) -> None:
    alone, *ranks = (make_loader(rows=4), *(make_loader(rows=4, rank=r, size=2) for r in (0, 1)))
    for _ in range(50):
        shares = [rank.next()[0] for rank in ranks]
        assert torch.equal(torch.cat(shares), alone.next()[0])
    assert [row for rank in ranks for row in rank.state] == alone.state


def test_state_of_two_ranks_continues_in_one(make_loader: MakeLoader) -> None:
    ranks = [make_loader(rows=4, rank=rank, size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.next()
    alone = make_loader(rows=4, state=[row for rank in ranks for row in rank.state])
    assert torch.equal(alone.next()[0], torch.cat([rank.next()[0] for rank in ranks]))


def test_text_comes_back_from_the_tokens(make_loader: MakeLoader, dataset: Path) -> None:
    from tokenizers import Tokenizer

    description = json.loads(dataset.read_text())
    tokenizer = Tokenizer.from_file(str(Path(description["tokenizer"]["path"]) / "tokenizer.json"))
    ids = make_loader(rows=1, seq_len=2000).next()[0][0].tolist()
    middle = ids[ids.index(description["tokenizer"]["eos_id"]) + 1 :]
    document = middle[: middle.index(description["tokenizer"]["eos_id"])]
    originals = [json.loads(line)["text"] for line in open_lines(description)]
    assert tokenizer.decode(document) in originals


def open_lines(description: dict[str, Any]) -> list[str]:
    (source,) = description["sources"]
    return Path(source["path"]).read_text(encoding="utf-8").splitlines()


def test_state_counts_taken_batches_and_not_prefetched_ones(make_loader: MakeLoader, dataset: Path) -> None:
    whole = make_loader()
    before = [whole.next() for _ in range(7)]
    state = json.loads(json.dumps(whole.state))
    expected = [whole.next() for _ in range(800)]
    assert before
    resumed = make_loader(state=state)
    for inputs, targets in expected:
        got = resumed.next()
        assert torch.equal(got[0], inputs)
        assert torch.equal(got[1], targets)
    assert resumed.state == whole.state
    documents = json.loads(dataset.read_text())["documents"]
    assert min(finished for _, _, finished, *_ in whole.state) > documents / 2, "the test crosses an epoch"


def test_invalid_state_is_refused(make_loader: MakeLoader) -> None:
    with pytest.raises(CheckpointError, match=r"the data loader's state is invalid: \[\['x'\]\]"):
        make_loader(state=[["x"]])
    with pytest.raises(CheckpointError, match=r"global batch has 1 sequences, train\.global_batch_size=2"):
        make_loader(state=[[0, 0, 0, 0]])
    with pytest.raises(CheckpointError, match=r"ranks have drawn different numbers of batches: \[3, 4\]"):
        make_loader(state=[[3, 0, 0, 0], [4, 0, 0, 0]])


def test_error_in_the_background_is_raised_where_batches_are_taken(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> list[int]:
        raise DataError("the tokenizer broke")

    monkeypatch.setattr("trainer.data.loader.make_encoder", lambda tokenizer: broken)
    with pytest.raises(DataError, match="the tokenizer broke"):
        make_loader().next()


def test_missing_prepared_file_is_named(dataset: Path) -> None:
    description = json.loads(dataset.read_text())
    description["files"][0]["path"] = "/nowhere/part-00000.arrow"
    loader = Loader(Config(), description, rank=0, size=1)
    with pytest.raises(DataError, match=r"/nowhere/part-00000\.arrow: prepared corpus is missing or damaged"):
        loader.next()
    loader.close()


@given(
    rows=st.sampled_from([4, 6, 12]),
    seq_len=st.integers(5, 200),
    seed=st.integers(0, 3),
    plan=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=5),
)
@settings(max_examples=25, deadline=None)
def test_any_layouts_one_after_another_give_the_one_global_sequence(
    mixed: dict[str, Any], rows: int, seq_len: int, seed: int, plan: list[tuple[int, int]]
) -> None:
    """Stop anywhere, continue with any number of ranks: no token is lost or repeated."""
    data = DataConfig(sources=sources_of(mixed, 3.0, 1.0), prefetch_batches=2, skip_steps=[2, 7])
    config = Config(seed=seed, data=data, train=TrainConfig(global_batch_size=rows, seq_len=seq_len))

    def opened(rank: int, size: int, state: Any) -> Loader:
        return Loader(config, mixed, rank=rank, size=size, state=state)

    whole, state = opened(0, 1, None), None
    try:
        for wanted, batches in plan:
            size = max(divisor for divisor in range(1, rows + 1) if rows % divisor == 0 and divisor <= wanted)
            ranks = [opened(rank, size, state) for rank in range(size)]
            try:
                for _ in range(batches):
                    shares = [rank.next() for rank in ranks]
                    for part, expected in zip(zip(*shares, strict=True), whole.next(), strict=True):
                        assert torch.equal(torch.cat(part), expected)
                    assert {rank.batch for rank in ranks} == {whole.batch}
                state = json.loads(json.dumps([row for rank in ranks for row in rank.state]))
            finally:
                for rank in ranks:
                    rank.close()
            assert state == whole.state
    finally:
        whole.close()


def test_skipped_batches_move_the_later_ones_up(make_loader: MakeLoader) -> None:
    whole = make_loader()
    batches = {number: whole.next()[0] for number in range(1, 9)}
    skipping = make_loader(skip=[1, 4, 5])
    for number in (2, 3, 6, 7, 8):
        assert torch.equal(skipping.next()[0], batches[number])
        assert skipping.batch == number
    assert skipping.state == whole.state


def test_every_sequence_leads_back_to_the_rows_of_its_files(make_loader: MakeLoader, dataset: Path) -> None:
    from tokenizers import Tokenizer

    description = json.loads(dataset.read_text())
    tokenizer = Tokenizer.from_file(str(Path(description["tokenizer"]["path"]) / "tokenizer.json"))
    lines = open_lines(description)
    loader = make_loader(seq_len=300)
    for _ in range(5):
        inputs, _ = loader.next()
        for sequence, spans in zip(inputs.tolist(), loader.spans, strict=True):
            assert sum(span.tokens for span in spans) == 300
            place = 0
            for span in spans:
                origin = loader.sources[span.source].origin(span.document)
                assert origin.file == description["sources"][0]["path"]
                text = json.loads(lines[origin.row - 1])["text"]
                ids = [*tokenizer.encode(text, add_special_tokens=False).ids, description["tokenizer"]["eos_id"]]
                assert sequence[place : place + span.tokens] == ids[span.first : span.first + span.tokens]
                place += span.tokens


def test_run_gets_its_weights_and_skips_the_batches_of_its_journal(mixed: dict[str, Any]) -> None:
    data = DataConfig(sources=sources_of(mixed, 9.0, 1.0), skip_steps=["2-3"])
    config = Config(data=data, train=TrainConfig(global_batch_size=4, seq_len=64))
    loader = Loader(
        config, mixed, rank=0, size=1, events=[{"kind": "data_changed", "key": SKIP_STEPS, "value": [1, 5]}]
    )
    try:
        numbers = []
        for _ in range(400):
            loader.next()
            numbers.append(loader.batch)
        assert numbers[:3] == [4, 6, 7]
        first, second = (sum(row[index] for row in loader.state) for index in (3, 5))
        assert first / (first + second) > 0.8
    finally:
        loader.close()


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


class Lengths(Sequence[Tokens]):
    """Documents of ids whose lengths vary around a mean, without storage."""

    def __init__(self, documents: int, mean: int) -> None:
        self._documents, self._mean = documents, mean

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, position: Any) -> Any:
        spread = 0.5 + Permutation(self._documents, "lengths")[position] / self._documents
        return np.zeros(round(self._mean * spread), dtype=np.int32)


def test_shares_of_tokens_are_exact_in_each_stage_and_a_shared_source_goes_on() -> None:
    """Over 200 M tokens a stage; rows differ from their shares by a document or two, however many tokens there are."""
    stages = [
        StageConfig(name="pre", tokens=200_000_000, set={"data.weights": {"web": 7, "math": 3}}),
        StageConfig(name="mid", tokens=200_000_000, set={"data.weights": {"web": 2, "books": 3}}),
    ]
    sources = {"web": Lengths(120_000, 4_000), "math": Lengths(60_000, 9_000), "books": Lengths(20_000, 30_000)}
    config = Config(
        data=DataConfig(sources=[SourceConfig(path=name) for name in sources]),
        train=TrainConfig(seq_len=1_000_000, global_batch_size=4, stages=stages),
    )
    state: State = [[0, *Position.start(3).to_json()] for _ in range(4)]
    read, step = Counter[tuple[int, int]](), 0
    for stage in config.stages:
        own = stage.config
        weights, tokens, documents = own.data.source_weights, [0, 0, 0], list(sources.values())
        deal = Deal(
            [len(source) for source in documents],
            keys=list(sources),
            weights=weights,
            lengths=[4_000, 9_000, 30_000],
            rows=4,
            seed=1,
        )
        positions = [Position.from_json(entry[1:], 3) for entry in mixed_anew(config, step, state)]
        rows = [PackedRow(documents, deal, _never, eos_id=0, row=n, start=at) for n, at in enumerate(positions)]
        for row in (row for row in rows for _ in range(stage.steps)):
            row.take(own.train.seq_len)
            for span in row.spans:
                tokens[span.source] += span.tokens
                read[span.source, span.document] += span.tokens
        step = stage.last_step
        state = [[step, *row.position.to_json()] for row in rows]
        shares = [weight / sum(weights) for weight in weights]
        assert [count / sum(tokens) for count in tokens] == pytest.approx(shares, abs=1e-4)
    lengths = list(sources.values())
    assert all(count <= len(lengths[source][document]) for (source, document), count in read.items()), (
        "none was read twice"
    )
    partly = sum(count < len(lengths[source][document]) for (source, document), count in read.items())
    assert partly <= 2 * 4, "only the documents that are open at the end of a stage or the run"


def _never(text: str) -> Tokens:
    raise AssertionError(text)
