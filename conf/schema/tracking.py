"""Mirrors of the journal, and messages to people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from conf.constraints import NonNegativeFloat, PositiveFloat, Range

NotifyKind = Literal[
    "failed",
    "needs_person",
    "walked_back",
    "node_left_out",
    "straggler",
    "alarm",
    "loss_spike",
    "stall",
    "budget",
    "milestone",
    "finished",
    "stopped",
    "amended",
    "forecast_slip",
]


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where the journal is mirrored to."""

    enabled: bool = True
    """Copy to MLflow, and start Prefect's API for a run. `false` reports to Prefect only if its server is running."""
    mlflow_uri: str | None = None
    """MLflow tracking server or `sqlite:///file`; none: `<runs_dir>/mlflow.db`."""
    experiment: str = "hlatctl"
    """MLflow experiment, and project at Weights & Biases; MLflow keeps simulated runs in one of their own."""
    register_model: str | None = None
    """Name in MLflow's model registry of the models that `hlatctl checkpoint export` writes; none: not registered."""
    mirrors: list[str] = field(default_factory=list)
    """Further copies: `tensorboard` (event files in the run directory), `wandb` (Weights & Biases)."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes files into the run directory, which `wandb sync` uploads."""
    wandb_entity: str | None = None
    """User or team at Weights & Biases; none: the default of the account."""
    poll_s: PositiveFloat = 5.0
    """Interval at which the mirror reads new events."""
    final_sync_timeout_s: NonNegativeFloat = 20.0
    """How long the end of a run waits for MLflow and for messages; `hlatctl sync` copies missing entries later."""


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Messages to people about a run. Each trial of a sweep is silent."""

    urls: list[str] = field(default_factory=list)
    """Where messages go: `env:NAME` or `file:/PATH` (mode 600), which contain an Apprise URL (chat, mail, webhook)."""
    on: list[NotifyKind] = field(
        default_factory=lambda: [
            "failed",
            "needs_person",
            "walked_back",
            "node_left_out",
            "alarm",
            "loss_spike",
            "stall",
            "budget",
            "milestone",
            "finished",
        ]
    )
    """What messages are about: `failed`, `needs_person`, `walked_back`, `node_left_out`, `straggler`, `alarm`,
    `loss_spike`, `stall`, `budget`, `milestone`, `finished`, `stopped`, `amended`, `forecast_slip` (the predicted end
    is a day later)."""
    digest_hour: Annotated[int, Range(ge=0, le=23)] | None = None
    """Hour (UTC) of a daily digest: tokens, loss, scores, goodput, failures, forecast; none: no digest."""
