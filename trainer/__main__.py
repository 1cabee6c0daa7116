"""``torchrun -m trainer --run-dir RUN --attempt K``: train, or compile, or check the cache of compiled graphs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conf.environment import cache_variable
from conf.load import load
from conf.of_run import of_run
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from trainer.process import answer_signal, follow_launcher, keep_evidence_in, run_rank, show_stacks_when_asked

if TYPE_CHECKING:
    from trainer.backends.base import Backend


def main(argv: list[str] | None = None) -> int:
    """Run the process and return its exit code."""
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="configuration of this attempt; none: the run's newest")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's cache and exit")
    parser.add_argument("--check-coverage", action="store_true", help="check that the cache has every graph, and exit")
    parser.add_argument("--max-checkpoint-step", type=int, help="ignore newer checkpoints")
    arguments = parser.parse_args(argv)
    run = RunPaths(arguments.run_dir.absolute())
    read = files.read_shared_text
    config = load(arguments.config, read=read) if arguments.config else of_run(run, read=read)

    _keep_to_own_cache(config)
    from trainer.backends import make_backend

    backend = make_backend(config)
    if arguments.compile_only:
        code = _compile_only(config, run, backend)
    elif arguments.check_coverage:
        code = _check_coverage(config, run, backend)
    else:
        code = _train(config, run, backend, arguments.attempt, arguments.max_checkpoint_step)
    backend.close()  # not after an error: see `run_rank`
    return code


def _keep_to_own_cache(config: Config) -> None:
    folder = os.environ.get(cache_variable(config))
    if config.backend.compile and folder and "://" not in folder:
        from hlatctl.cache.trust import make_private

        make_private(Path(folder).expanduser())


def _train(config: Config, run: RunPaths, backend: Backend, attempt: int, max_checkpoint_step: int | None) -> int:
    from conf.registries import BACKENDS
    from trainer.step.training import train_journal

    keep_evidence_in(run.hang(attempt), backend.rank)
    journal = train_journal(run, backend, attempt)
    try:
        for message in backend.warnings:
            _warn(backend, message)
            if journal:
                journal.append("warning", message=message)
        training = BACKENDS.part(config.backend.name, "training")
        code: int = training(
            config, run, backend, journal, attempt=attempt, max_checkpoint_step=max_checkpoint_step
        ).run()
        return code
    finally:
        if journal:
            journal.close()


def _compile_only(config: Config, run: RunPaths, backend: Backend) -> int:
    from hlatctl.cache import graphs
    from trainer.step import coverage

    for message in backend.warnings:
        _warn(backend, message)
    if not backend.compiles:
        return 0
    if os.environ.get(coverage.EXTRACTING):
        coverage.visit(config, run, backend)
    else:
        coverage.compile_only(config, backend)
    backend.gather(None)  # wait until every process has written its graphs
    folder = os.environ.get(cache_variable(config))
    if folder and backend.rank == 0:
        graphs.write_manifest(Path(folder))
    return 0


def _check_coverage(config: Config, run: RunPaths, backend: Backend) -> int:
    from trainer.step import coverage

    before = coverage.cached_graphs(config)
    backend.gather(None)  # no process may compile before all have listed the cache
    coverage.visit(config, run, backend)
    coverage.check(config, run, backend, before)
    return 0


def _warn(backend: Backend, message: str) -> None:
    if backend.rank == 0:
        print(f"warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    follow_launcher()
    answer_signal()
    show_stacks_when_asked()
    run_rank(main)
