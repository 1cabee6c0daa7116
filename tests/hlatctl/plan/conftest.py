"""HLAT's two experiments, composed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from conf.compose import compose
from conf.schema import Config

Nodes = Callable[[Config, int], Config]


@pytest.fixture(scope="session")
def hlat_7b() -> Config:
    return compose(["experiment=hlat_7b"])


@pytest.fixture(scope="session")
def hlat_70b() -> Config:
    return compose(["experiment=hlat_70b"])


def on_nodes(config: Config, nodes: int) -> Config:
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=nodes))


def with_hardware(config: Config, **values: object) -> Config:
    hardware = dataclasses.replace(config.cluster.hardware, **values)  # type: ignore[arg-type]
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hardware=hardware))
