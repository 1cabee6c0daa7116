from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hlatctl.run.errors import CheckpointError, DataError
from trainer.data.loader import Loader

MakeLoader = Callable[..., Loader]


@pytest.fixture
def make_loader(dataset: Path) -> Iterator[MakeLoader]:
    opened: list[Loader] = []

    def make(**changes: Any) -> Loader:
        arguments = {"global_batch_size": 2, "seq_len": 32, "seed": 1, "rank": 0, "size": 1, "prefetch_batches": 3}
        opened.append(Loader(json.loads(dataset.read_text()), **{**arguments, **changes}))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def test_targets_are_the_inputs_one_token_later(make_loader: MakeLoader) -> None:
    loader = make_loader()
    inputs, targets = loader.next()
    assert (inputs.shape, inputs.dtype) == ((2, 32), torch.int64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets[:, -1], loader.next()[0][:, 0])


def test_ranks_share_out_the_sequences_that_one_process_would_take(make_loader: MakeLoader) -> None:
    alone, *ranks = (
        make_loader(global_batch_size=4),
        *(make_loader(global_batch_size=4, rank=r, size=2) for r in (0, 1)),
    )
    for _ in range(50):
        shares = [rank.next()[0] for rank in ranks]
        assert torch.equal(torch.cat(shares), alone.next()[0])
    assert [row for rank in ranks for row in rank.state] == alone.state


def test_state_of_two_ranks_goes_on_in_one(make_loader: MakeLoader) -> None:
    ranks = [make_loader(global_batch_size=4, rank=rank, size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.next()
    alone = make_loader(global_batch_size=4, state=[row for rank in ranks for row in rank.state])
    assert torch.equal(alone.next()[0], torch.cat([rank.next()[0] for rank in ranks]))


def test_text_comes_back_from_the_tokens(make_loader: MakeLoader, dataset: Path) -> None:
    from tokenizers import Tokenizer

    description = json.loads(dataset.read_text())
    tokenizer = Tokenizer.from_file(str(Path(description["tokenizer"]["path"]) / "tokenizer.json"))
    ids = make_loader(global_batch_size=1, seq_len=2000).next()[0][0].tolist()
    middle = ids[ids.index(description["tokenizer"]["eos_id"]) + 1 :]
    document = middle[: middle.index(description["tokenizer"]["eos_id"])]
    originals = [json.loads(line)["text"] for line in open_lines(description)]
    assert tokenizer.decode(document) in originals


def open_lines(description: dict[str, Any]) -> list[str]:
    (source,) = description["sources"]
    return Path(source["path"]).read_text(encoding="utf-8").splitlines()


def test_state_is_of_the_batches_taken_not_of_those_made_ahead(make_loader: MakeLoader) -> None:
    whole = make_loader()
    before = [whole.next() for _ in range(7)]
    state = json.loads(json.dumps(whole.state))
    expected = [whole.next() for _ in range(800)]
    assert before
    resumed = make_loader(state=state, prefetch_batches=1)
    for inputs, targets in expected:
        got = resumed.next()
        assert torch.equal(got[0], inputs)
        assert torch.equal(got[1], targets)
    assert resumed.state == whole.state
    assert min(epoch for epoch, *_ in whole.state) > 0, "the test crosses an epoch"


def test_state_that_is_none_is_refused(make_loader: MakeLoader) -> None:
    with pytest.raises(CheckpointError, match=r"the data loader's state is not one: \[\['x'\]\]"):
        make_loader(state=[["x"]])
    with pytest.raises(CheckpointError, match=r"global batch has 1 sequences, train\.global_batch_size=2"):
        make_loader(state=[[0, 0, 0]])


def test_error_in_the_background_is_raised_where_batches_are_taken(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Loader, text: str) -> list[int]:
        raise DataError("the tokenizer broke")

    monkeypatch.setattr(Loader, "_encode", broken)
    with pytest.raises(DataError, match="the tokenizer broke"):
        make_loader().next()


def test_prepared_file_that_is_gone_is_named(dataset: Path) -> None:
    description = json.loads(dataset.read_text())
    description["files"][0]["path"] = "/nowhere/part-00000.arrow"
    with pytest.raises(DataError, match=r"/nowhere/part-00000\.arrow: prepared corpus is missing or damaged"):
        Loader(description, global_batch_size=1, seq_len=8, seed=1, rank=0, size=1, prefetch_batches=1)
