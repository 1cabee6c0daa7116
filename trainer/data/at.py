"""``python -m trainer.data.at --run-dir RUN --step N``: the documents that a step was trained on, as JSON on stdout.

The loader is a pure function of the run's configuration and corpus. So this runs it again, from the newest checkpoint
before the step, or from the start if there is none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.data_changes import DATA_CHANGED, batch_after, skipped_batches
from conf.of_run import check_step, of_run
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checkpoint import checkpoint_steps, events_about, read_rank_states
from hlatctl.run.errors import DataError, HlatctlError, run_main
from hlatctl.run.files import DAMAGED, why
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event
from hlatctl.run.paths import RunPaths

_EXCERPT_CHARACTERS = 60
#: The trainer's own changes of data take effect within an attempt; an operator's take effect in the next one.
_TRAINER = "trainer"


def documents_at(run: RunPaths, step: int) -> dict[str, Any]:
    """Return the documents of each sequence of an optimizer step (1-based).

    For a step that was not trained (or not again after a rollback), these are the documents it would be trained on.

    Returns:
        ``step``; ``batch``; ``from_step``, whose checkpoint the loader started from (0: the start); ``trained``;
        ``sequences``: lists of ``source``, ``file``, ``row``, ``first_token``, ``tokens``, ``text`` (the first 60
        characters).

    Raises:
        ConfigError: the run has no such step.
        DataError: its corpus is missing.
    """
    from trainer.data.loader import Loader, mixed_anew

    config = of_run(run)
    check_step(config, step, "--step")
    events = events_about(run, step)
    trained = step in read_state(run).steps
    from_step, state = _checkpoint_before(config, run, step)
    counted = events_that_count(events, step) if trained else events
    stage = config.stage_at(step)
    if stage and from_step < stage.after_step:
        raise DataError(
            f"--step={step}: no checkpoint of its stage {stage.name} is left, and the stage before reads other batches",
            hint=f"name a step after one that `hlatctl checkpoint ls {run.run_id}` shows",
        )
    state = mixed_anew(config, from_step, state) if state else None
    loader = Loader(config.during(step), _dataset(run), rank=0, size=1, state=state, events=counted)
    try:
        first = loader.batch
        for _ in range(step - from_step):
            loader.next()
        assert loader.batch == batch_after(first, step - from_step, skipped_batches(config, counted))
        return {
            "step": step,
            "batch": loader.batch,
            "from_step": from_step,
            "trained": trained,
            "sequences": [_describe(loader, index) for index in range(len(loader.spans))],
        }
    finally:
        loader.close()


def events_that_count(events: Sequence[Event], step: int) -> list[Event]:
    """Return the events that the newest attempt that trained the step had read by then."""
    ran = max(i for i, event in enumerate(events) if event["kind"] == "step" and event["step"] == step)
    attempt = events[ran]["attempt"]
    began = max(
        (i for i, e in enumerate(events[:ran]) if e["kind"] == "train_started" and e["attempt"] == attempt), default=0
    )
    own = [e for e in events[began:ran] if e["kind"] != DATA_CHANGED or e.get("by") == _TRAINER]
    return [*events[:began], *own]


def _checkpoint_before(config: Config, run: RunPaths, step: int) -> tuple[int, list[list[int]] | None]:
    """Return the step and the loader's state of the newest checkpoint before a step.

    Without one, or if the corpus begins there: the step that the run began from, and None. Raises a DataError if the
    run continues another run's data, and has no checkpoints left.
    """
    for earlier in sorted((s for s in checkpoint_steps(run) if s < step), reverse=True):
        if config.begins_data_at(earlier):
            break
        try:
            return earlier, read_rank_states(run.checkpoint(earlier)).loader
        except (OSError, HlatctlError, *DAMAGED) as error:
            print(f"checkpoint of step {earlier}: not readable ({why(error)})", file=sys.stderr)
    if config.fork.run is not None and not config.fork.restarts_data:
        raise DataError(
            f"--step={step}: no earlier checkpoint of {run.run_id} is left, and its data continue those of another run",
            hint=f"name a step after the oldest one that `hlatctl checkpoint ls {run.run_id}` shows",
        )
    return config.fork.step, None


def _dataset(run: RunPaths) -> dict[str, Any]:
    try:
        return files.read_sealed_json(run.dataset)
    except (OSError, ValueError) as error:
        raise DataError(f"{run.dataset}: not readable ({error})") from None


def _describe(loader: Any, index: int) -> list[dict[str, Any]]:
    documents = []
    for span in loader.spans[index]:
        source = loader.sources[span.source]
        origin = source.origin(span.document)
        documents.append(
            {
                "source": source.name,
                "file": origin.file,
                "row": origin.row,
                "first_token": span.first,
                "tokens": span.tokens,
                "text": source.excerpt(span.document, _EXCERPT_CHARACTERS),
            }
        )
    return documents


def main(argv: list[str] | None = None) -> int:
    """Print the documents of a step as JSON."""
    parser = argparse.ArgumentParser(prog="trainer.data.at", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    arguments = parser.parse_args(argv)
    print(json.dumps(documents_at(RunPaths(arguments.run_dir.absolute()), arguments.step)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
