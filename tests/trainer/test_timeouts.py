"""How long collectives wait, compared with the driver's limits of a hang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from conf.schema import Config, RecoveryConfig
from trainer import rendezvous


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def _timeout(group: dist.ProcessGroup) -> timedelta:
    options = group._get_backend(torch.device("cpu")).options
    waits: timedelta = options._timeout
    return waits


def test_all_groups_of_training_wait_as_long_and_those_of_the_hosts_as_before(world: dist.ProcessGroup) -> None:
    other = dist.new_group([0])
    (hosts,) = rendezvous.host_groups(timedelta(minutes=7))
    rendezvous.set_timeout(timedelta(minutes=3))
    assert {_timeout(group) for group in (world, other)} == {timedelta(minutes=3)}
    assert _timeout(hosts) == timedelta(minutes=7)


def test_the_driver_finds_a_hang_before_a_collective_gives_up() -> None:
    recovery = RecoveryConfig(start_timeout_s=7200.0, hang_floor_s=60.0, hang_factor=10.0)
    config = replace(Config(), recovery=recovery)
    waits_s = [rendezvous.timeout(config, step_s).total_seconds() for step_s in (None, 1.0, 30.0)]
    assert all(waits - limit >= 300 for waits, limit in zip(waits_s, (7200.0, 60.0, 300.0), strict=True))
