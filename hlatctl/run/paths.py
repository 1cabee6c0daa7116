"""Names of all files and folders in a runs folder.

Layout (complete in ``docs/architecture.md``)::

    <runs_dir>/<run_id>/   a run, see RunPaths
    <runs_dir>/<sweep_id>/ a sweep, see SweepPaths; its trials are runs in the same runs folder
    <runs_dir>/.cache/     prepared corpora and compiled graphs, shared by runs, keyed by fingerprint
    <runs_dir>/.prefect/   Prefect's database if no server is configured
    <runs_dir>/nodes.jsonl the node ledger of all runs
    <runs_dir>/mlflow.db   MLflow's database by default; its artifacts are in mlartifacts/

The files that training processes write about a hang, and the orders and results of `hlatctl profile`, are named here
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlatctl.run.files import from_plain

_ATTEMPT, _AMENDED = "attempt-", "config-"
_NODES, _MLFLOW, _ARTIFACTS = "nodes.jsonl", "mlflow.db", "mlartifacts"


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder: ``step-00001000``."""
    return f"step-{step:08d}"


def attempt_name(attempt: int) -> str:
    """Return the name of an attempt's folder: ``attempt-0001``."""
    return f"{_ATTEMPT}{attempt:04d}"


def attempt_of(name: str) -> int:
    """Return the attempt in a folder's name; 0 if the name is not an attempt's."""
    number = name.removeprefix(_ATTEMPT)
    return int(number) if name.startswith(_ATTEMPT) and number.isdecimal() else 0


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run directory.

    Args:
        root: ``<runs_dir>/<run_id>``.
    """

    root: Path

    @property
    def run_id(self) -> str:
        """The run's id: the folder's name."""
        return self.root.name

    @property
    def config(self) -> Path:
        """Resolved, complete configuration; written once."""
        return self.root / "config.yaml"

    def amended_config(self, number: int) -> Path:
        """``config-<n>.yaml``: the whole configuration after amendment n; derived (``conf.of_run``)."""
        return self.root / f"{_AMENDED}{number}.yaml"

    def amended_configs(self) -> list[int]:
        """Return the numbers of the amendments whose files exist."""
        names = (path.stem.removeprefix(_AMENDED) for path in self.root.glob(f"{_AMENDED}*.yaml"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def newest_config(self) -> Path:
        """The file of the newest amendment's configuration, or ``config.yaml``."""
        numbers = self.amended_configs()
        return self.amended_config(numbers[-1]) if numbers else self.config

    @property
    def simulation(self) -> Path:
        """``simulation.yaml``: settings of the simulated cluster of a dry run, unless it has the defaults."""
        return self.root / "simulation.yaml"

    @property
    def provenance(self) -> Path:
        """``provenance.json``: argv, git state, versions, host."""
        return self.root / "provenance.json"

    @property
    def origins(self) -> Path:
        """Where each value of the configuration came from, until ``provenance.json`` has it."""
        return self.root / "origins.json"

    @property
    def journal(self) -> Path:
        """Folder of the append-only event files, one file per writer."""
        return self.root / "journal"

    @property
    def fold(self) -> Path:
        """Folder of the stored fold of the journal; derived (``hlatctl.run.fold``)."""
        return self.journal / ".fold"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Folder of one checkpoint."""
        return self.checkpoints / step_name(step)

    @property
    def evals(self) -> Path:
        """Folder of the evaluations."""
        return self.root / "evals"

    def eval(self, milestone_tokens: int) -> Path:
        """Folder of one milestone's evaluation."""
        return self.evals / f"tokens-{milestone_tokens}"

    def continuations(self, milestone_tokens: int) -> Path:
        """How one milestone continues the prompts of ``eval.prompts``."""
        return self.eval(milestone_tokens) / "continuations.json"

    def contamination(self, milestone_tokens: int) -> Path:
        """Folder of the scans for evaluation items in the corpus up to a milestone (``trainer.data.overlap``)."""
        return self.evals / "contamination" / f"tokens-{milestone_tokens}"

    @property
    def contract(self) -> Path:
        """``evals/contract.json``: what the run's evaluations measure, and how."""
        return self.evals / "contract.json"

    def own_model(self, milestone_tokens: int) -> Path:
        """Folder to which the run's driver exports a milestone; `hlatctl eval` adds a suffix."""
        return self.eval(milestone_tokens) / "model"

    def eval_lease(self, milestone_tokens: int) -> Path:
        """Held (flock) by the process that evaluates a milestone."""
        return self.eval(milestone_tokens) / "lease"

    @property
    def evaluator_lock(self) -> Path:
        """Held (flock) by the process of a `hlatctl eval`."""
        return self.evals / "evaluator.lock"

    def logs(self, attempt: int) -> Path:
        """Folder of one attempt's logs."""
        return self.root / "logs" / attempt_name(attempt)

    def hang(self, attempt: int) -> Path:
        """Folder of the evidence that the processes of a hung attempt left."""
        return self.logs(attempt) / "hang"

    @property
    def driver_log(self) -> Path:
        """``logs/driver.log``: the driver's output."""
        return self.root / "logs" / "driver.log"

    def launch(self, attempt: int) -> Path:
        """Folder of the scripts submitted for one attempt; attempt 0: all jobs except training."""
        return self.root / "launch" / attempt_name(attempt)

    def orders(self, attempt: int) -> Path:
        """What the driver asks of a training attempt because of amendments (``train.amendment``)."""
        return self.launch(attempt) / "train.amendment"

    @property
    def fence(self) -> Path:
        """``launch/fence``: the newest attempt whose processes must not write any more (``hlatctl.run.fence``)."""
        return self.root / "launch" / "fence"

    @property
    def dataset(self) -> Path:
        """``dataset.json``: the prepared corpus and tokenizer that this run trains on."""
        return self.root / "dataset.json"

    @property
    def compile_cache(self) -> Path:
        """``compile_cache.json``: where the compiled graphs are (shared, and on each worker)."""
        return self.root / "compile_cache.json"

    @property
    def coverage(self) -> Path:
        """``coverage.json``: which graphs a short attempt found in the cache."""
        return self.root / "coverage.json"

    @property
    def preflight(self) -> Path:
        """``preflight.json``: measurements of each worker before training."""
        return self.root / "preflight.json"

    @property
    def preflight_nodes(self) -> Path:
        """Folder with the output of each node's tools before training, one file per host."""
        return self.root / "preflight"

    @property
    def report(self) -> Path:
        """Folder of figures, tables and the HTML page."""
        return self.root / "report"

    @property
    def profiles(self) -> Path:
        """Folder of the profiles of `hlatctl profile`."""
        return self.root / "profiles"

    def profile(self, number: int) -> Path:
        """Folder of one complete profile."""
        return self.profiles / f"{number:04d}"

    def partial_profile(self, number: int) -> Path:
        """Folder in which training writes a profile."""
        return self.profiles / f".{number:04d}.partial"

    @property
    def driver_lock(self) -> Path:
        """Held (flock) by the process that drives the run."""
        return self.root / "head.lock"

    @property
    def driver_job(self) -> Path:
        """``driver-job.json``: the chain of a scheduler's jobs that drives the run (``hlatctl.driver_job``)."""
        return self.root / "driver-job.json"

    @property
    def evaluator_job(self) -> Path:
        """``evaluator-job.json``: the same for a `hlatctl eval` of the run."""
        return self.root / "evaluator-job.json"

    @property
    def head_log(self) -> Path:
        """``logs/head.log``: what the processes of drivers in the background and in jobs print."""
        return self.root / "logs" / "head.log"

    @property
    def prefect(self) -> Path:
        """``prefect.json``: the id of the run's flow run in Prefect."""
        return self.root / "prefect.json"

    def mirror_cursor(self, name: str) -> Path:
        """``mirrors/<name>.json``: how far the journal has been copied to a mirror."""
        return self.root / "mirrors" / f"{name}.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def notify(self) -> Path:
        """``notify.json``: how far the journal has been read for messages to people, and unsent messages."""
        return self.root / "notify.json"


@dataclass(frozen=True)
class SweepPaths(RunPaths):
    """Paths of one sweep's directory. Like a run's, it has a journal, logs and a driver lock.

    Args:
        root: ``<runs_dir>/<sweep_id>``.
    """

    @property
    def space(self) -> Path:
        """``sweep.yaml``: the sweep's overrides, axes and settings; rewritten only when it is extended."""
        return self.root / "sweep.yaml"

    @property
    def study(self) -> Path:
        """``optuna.db``: Optuna's view of the journal."""
        return self.root / "optuna.db"

    @property
    def best(self) -> Path:
        """``report/best.yaml``: the winning arm as an experiment."""
        return self.report / "best.yaml"

    def trial(self, number: int) -> RunPaths:
        """The run directory of one trial."""
        return RunPaths(self.root.parent / trial_id(self.run_id, number))


def trial_id(sweep_id: str, number: int) -> str:
    """Return the run id of a sweep's trial: ``beta2-t0007``."""
    return f"{sweep_id}-t{number:04d}"


def partial_data(folder: Path) -> Path:
    """Return the folder in which a prepared corpus is made; its file ``progress`` has one line of text."""
    return folder.with_name(f".{folder.name}.partial")


def cache_dir(runs_dir: Path) -> Path:
    """Prepared corpora and compiled graphs, shared by the runs of a runs folder."""
    return runs_dir / ".cache"


def compile_cache_dir(runs_dir: Path) -> Path:
    """Compiled graphs: a folder for each fingerprint."""
    return cache_dir(runs_dir) / "compile"


def environment_dir(runs_dir: Path) -> Path:
    """Archives of Python environments, which nodes unpack on their own disks."""
    return cache_dir(runs_dir) / "env"


def nodes_file(folder: Path) -> Path:
    """The node ledger: preflight results, failures and stragglers by host, across the runs of a folder."""
    return folder / _NODES


def mlflow_database(runs_dir: Path) -> Path:
    """MLflow's database if no other address is configured."""
    return runs_dir / _MLFLOW


def mlflow_artifacts(runs_dir: Path) -> Path:
    """Folder of MLflow's artifacts if its address is a database."""
    return runs_dir / _ARTIFACTS


def is_reserved(name: str) -> bool:
    """Return whether hlatctl uses a name in the runs folder. Some file systems ignore case."""
    # SQLite adds -journal, -wal and -shm to its database's name.
    return name.lower() in (_NODES, _ARTIFACTS) or name.lower().startswith(_MLFLOW)


def stacks_name(rank: int) -> str:
    """Return the name of the stacks of a process's threads."""
    return f"rank-{rank:05d}.stacks.txt"


def collectives_name(rank: int) -> str:
    """Return the name of the newest collectives of a process."""
    return f"rank-{rank:05d}.collectives.json"


def answered(folder: Path) -> int:
    """Return how many processes have written their stacks."""
    return sum(1 for _ in folder.glob("rank-*.stacks.txt"))


#: A trace has every operator of every step.
MOST_STEPS = 20
#: Ranks of a profile. All of them write into one folder simultaneously, and people look at a few.
MOST_RANKS = 16


@dataclass(frozen=True)
class ProfileOrder:
    """One requested profile.

    Args:
        number: number in the run, from 1.
        steps: number of steps to record.
        ranks: ranks that record.
        memory: also record each allocation.
    """

    number: int
    steps: int
    ranks: list[int]
    memory: bool

    @classmethod
    def of(cls, value: Any) -> ProfileOrder:
        """Return the order of a JSON value.

        Raises:
            TypeError: a field is missing, unknown or of another type.
            ValueError: a number is out of range.
        """
        order = from_plain(cls, value)
        if not (order.number > 0 and 0 < order.steps <= MOST_STEPS and 0 < len(order.ranks) <= MOST_RANKS):
            raise ValueError(f"a profile of {order.steps} steps of {len(order.ranks)} ranks")
        return order


def trace_name(rank: int) -> str:
    """Return the name of a rank's trace, for a viewer of Chrome traces."""
    return f"rank-{rank:05d}.trace.json.gz"


def table_name(rank: int) -> str:
    """Return the name of a rank's table of operators, as text."""
    return f"rank-{rank:05d}.operators.txt"
