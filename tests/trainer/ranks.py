"""Run by ``trainer.launch`` with a folder: processes of one group that stay for more work; not a test by itself.

The fixture ``ranks`` starts them and writes files of jobs: lists of {"work": name of a function below, "run": folder,
…}. Importing PyTorch and creating a process group would take most of the time of each. A job with ``fork`` is done in a
process that is forked for it, has process groups of its own and may be killed.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import debug as tensor_debug
from torch.utils._python_dispatch import TorchDispatchMode

from conf.load import load
from hlatctl.cache import remote
from hlatctl.run import files, memory, processes
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.errors import TrainingError, run_main
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.paths import RunPaths

if TYPE_CHECKING:
    from trainer.parallel.layout import Layout

_POLL_S = 0.2


def train(run: RunPaths, job: dict[str, Any]) -> None:
    """Train an attempt that ends with ``code``, with ``slow_s`` that much slower data on rank 1.

    With ``product``, products are timed between steps although the model is small, slower by ``slow_s`` on rank 1.

    One process, ``stop_rank``, is asked to stop. One, ``kill_rank``, is killed in the middle of a step, ``kill_step``.
    From step ``wrong_step`` on, the first layer of one, ``wrong_rank``, is wrong by another factor each time.
    All end after a step, ``dies_after``, as if killed. With ``nodes``, the processes are on nodes of these names, whose
    memory is below a folder, ``memory``.
    """
    from conf.registries import BACKENDS
    from trainer.backends import make_backend
    from trainer.data.loader import Loader
    from trainer.step import monitor
    from trainer.step.loop import Training
    from trainer.step.training import train_journal

    config, attempt = load(run.config), job["attempt"]
    backend = make_backend(config)
    monitor._PRODUCT_SIZES = monitor._PRODUCT_SIZES[-1:]  # the smallest one
    monitor._PRODUCT_SHARE = float("inf") if job.get("product") else 1e-3
    journal = train_journal(run, backend, attempt)
    if nodes := job.get("nodes"):
        here = backend.world_size // len(nodes)
        memory.ROOT = Path(job["memory"])
        os.environ |= {"LOCAL_WORLD_SIZE": str(here), processes.NODE_NAME_ENV: nodes[backend.rank // here]}
    training = BACKENDS.part(config.backend.name, "training")(config, run, backend, journal, attempt=attempt)
    if isinstance(training, Training):
        readers = sum(backend.gather(isinstance(training.batches, Loader)))
        assert readers == config.data_parallel_size, "one process of each replica reads"
    if job.get("slow_s") and backend.rank == 1:
        _slow_down(*((training._product, "time") if job.get("product") else (training.batches, "next")), job["slow_s"])
    if job.get("stop_rank") == backend.rank:
        training.stop.requested = True  # as SIGTERM sets it
    if job.get("kill_rank") == backend.rank:
        _kill_within(training, job["kill_step"])
    if job.get("wrong_rank") == backend.rank:
        _spoil(training, job["wrong_step"])
    if "dies_after" in job:
        _die_after(training, job["dies_after"])
    try:
        assert training.run() == job.get("code", 0)
    except TrainingError:
        assert "wrong_rank" in job
    except _DiedError:
        assert "dies_after" in job
    if journal:
        journal.close()


class _DiedError(Exception):
    pass


def _die_after(training: Any, step: int) -> None:
    start = training._start_step

    def start_or_die() -> None:
        training.checkpoints._memory.wait()  # otherwise one that isn't sent yet would skip the next one
        if training.step > step:
            training.checkpoints.wait()
            raise _DiedError
        start()

    training._start_step = start_or_die


def _spoil(training: Any, step: int) -> None:
    calls = itertools.count()

    def wrong(_layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        return output * (1 + 1e-6 * next(calls)) if training.engine.step >= step else None

    next(iter(training.engine.model_parts[0].layers.values())).register_forward_hook(wrong)


def _slow_down(of: Any, name: str, seconds: float) -> None:
    honest = getattr(of, name)

    def late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return honest(*arguments)

    setattr(of, name, late)


def _kill_within(training: Any, step: int) -> None:
    """Kill this process in a step of torchtitan's loop, when the newest checkpoint before it and its copy are there."""
    run, checkpoint, update = training.run_paths, training.config.checkpoint, training.before_update
    newest = step - step % checkpoint.every_steps

    def complete() -> bool:
        if checkpoint.remote_url is None:
            return newest in checkpoint_steps(run)
        copies = remote.complete_copies(remote.remote_folder(checkpoint.remote_url, run.run_id))
        return newest in [copy.step for copy in copies]

    def die() -> None:
        if training.engine.step == step:
            while not complete():
                time.sleep(_POLL_S / 10)
            os.kill(os.getpid(), signal.SIGKILL)
        update()

    training.before_update = die


def drift(run: RunPaths, job: dict[str, Any]) -> list[float]:
    """Return the drift before and after rank 1's replica of a weight is changed by a hundredth."""
    from trainer.backends.torch_native import TorchNative

    backend = TorchNative(load(run.config))
    model = backend.build_model(document_end_id=None)
    optimizer = backend.optimizer(model)
    found = [backend.drift(optimizer)]
    if backend.rank == 1:
        with torch.no_grad():
            model.get_parameter("layers.1.mlp_norm.weight").mul_(1.01)
    return [*found, backend.drift(optimizer)]


class Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of process groups by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function._schema.name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


def exchanges(run: RunPaths, job: dict[str, Any]) -> dict[str, int]:
    """Return how often a step's micro-batches exchange weights and gradients, by operation."""
    from trainer.backends.torch_native import TorchNative

    config = load(run.config)
    backend = TorchNative(config)
    model = backend.build_model(document_end_id=None)
    backend.optimizer(model).zero_grad()
    share = config.train.global_batch_size // backend.data_parallel_size
    tokens = torch.randint(config.model.vocab_size, (share, config.train.seq_len))
    with Exchanges() as counted:
        backend.forward_backward(model, tokens, tokens)
    return dict(counted.counts)


def formats(run: RunPaths, job: dict[str, Any]) -> dict[str, list[str]]:
    """Return the number formats of what each kind of a layer's modules gets, during a micro-batch."""
    from trainer.backends.torch_native import TorchNative

    config = load(run.config)
    backend = TorchNative(config)
    model = backend.build_model(document_end_id=None)
    backend.optimizer(model).zero_grad()
    found: dict[str, set[str]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            found.setdefault(name, set()).add(" ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))

        return hook

    for layer in model.blocks():
        for name, module in layer.named_modules():
            module.register_forward_pre_hook(note(name or "layer"))
    share = config.train.global_batch_size // backend.data_parallel_size
    tokens = torch.randint(config.model.vocab_size, (share, config.train.seq_len))
    backend.forward_backward(model, tokens, tokens)
    return {name: sorted(seen) for name, seen in found.items()}


def corruption(run: RunPaths, job: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of steps without checks and with them, and what checks find of faults of one rank.

    ``faults`` are lists of a part, a rank, and whether the fault is only in the first replay.
    """
    from trainer.backends.torch_native import TorchNative
    from trainer.optim.adamw import local
    from trainer.step.corruption import CorruptionCheck
    from trainer.step.loop import subject_of

    config = load(run.config)
    backend = TorchNative(config)
    share = config.train.global_batch_size // backend.data_parallel_size
    generator = torch.Generator().manual_seed(backend.data_parallel_rank)
    tokens = torch.randint(config.model.vocab_size, (share, config.train.seq_len), generator=generator)
    hosts = [f"node-{rank}" for rank in range(backend.world_size)]

    def steps(*, checked: bool) -> tuple[list[Any], CorruptionCheck, Any, Any]:
        model = backend.build_model(document_end_id=None)
        optimizer = backend.optimizer(model)
        check = CorruptionCheck(config, backend, subject_of(backend, model, optimizer), hosts)
        numbers: list[Any] = []
        for number in (1, 2, 3):
            if checked:
                assert check.run(number) is None
            optimizer.zero_grad()
            loss = backend.forward_backward(model, tokens, tokens)
            metrics = backend.update(optimizer, loss, lr=1e-2, step=number)()
            numbers.append([metrics.loss, metrics.grad_norm, metrics.param_norm])
        sums = [float(local(tensor).double().sum()) for tensor in optimizer.tensors().values()]
        return [numbers, backend.gather(sums)], check, model, optimizer

    plain, *_others = steps(checked=False)
    with_checks, check, model, optimizer = steps(checked=True)

    def flip(tensor: Tensor) -> Tensor:
        changed = tensor.detach().clone()
        changed.view(-1).view(torch.int32)[0] ^= 1
        return changed

    found = []
    for part, rank, is_transient in job["faults"]:
        calls = itertools.count()

        def corrupt(_module: nn.Module, _inputs: Any, output: Tensor, part: str = part) -> Tensor | None:
            if is_transient and next(calls):  # noqa: B023 (called in this iteration)
                return None
            if part == "backward":
                output.register_hook(flip)  # type: ignore[no-untyped-call]
                return None
            return output + (flip(output) - output).detach()

        undo = None
        if backend.rank == rank:
            if part == "weights":
                weight = local(next(iter(optimizer.tensors().values())))
                weight.copy_(flip(weight))
            else:
                undo = next(iter(model.blocks())).register_forward_hook(corrupt)
        finding = check.run(4)
        found.append(None if finding is None else finding.fields)
        if undo:
            undo.remove()
    return {"plain": plain, "checked": with_checks, "found": found}


def piece(name: str, whole: Tensor, layout: Layout) -> Tensor:
    """Return this process's piece of a whole parameter."""
    from trainer.model.decoder import slice_dim

    assert layout.mesh is not None
    dim = slice_dim(name)
    if dim is not None:
        whole = torch.chunk(whole, layout.mesh["tp"].size(), dim)[layout.mesh.get_local_rank("tp")]
    if layout.shards_parameters:
        shards, shard = layout.mesh["dp"].size(), layout.mesh.get_local_rank("dp")
        size = -(-len(whole) // shards)
        whole = whole[shard * size : (shard + 1) * size]
    return whole


def weights(run: RunPaths, job: dict[str, Any]) -> list[int]:
    """Check that a model begins with the bits of a whole one; return how many numbers were drawn, and are there."""
    from trainer.backends.torch_native import TorchNative
    from trainer.model import initial
    from trainer.optim.adamw import local

    config, draw = load(run.config), initial.normal_block
    wholes = dict(initial.build(config.model, seq_len=config.train.seq_len, seed=config.seed).named_parameters())
    backend, drawn = TorchNative(config), 0

    def count(*args: Any) -> Tensor:
        nonlocal drawn
        numbers = draw(*args)
        drawn += numbers.numel()
        return numbers

    initial.normal_block = count  # type: ignore[assignment]
    try:
        model = backend.build_model(document_end_id=None)
    finally:
        initial.normal_block = draw
    parts = {name: local(parameter.detach()) for name, parameter in model.named_parameters()}
    for name, part in parts.items():
        expected = wholes[name] if backend.world_size == 1 else piece(name, wholes[name], backend._layout)
        torch.testing.assert_close(part, expected.detach(), rtol=0, atol=0, msg=f"{run.root}: {name}")
    return [drawn, sum(part.numel() for part in parts.values() if part.ndim == 2)]


def muon(run: RunPaths, job: dict[str, Any]) -> None:
    """Check that Muon's updates are the bits of one process's for equal gradients."""
    from trainer.backends.torch_native import TorchNative
    from trainer.model.decoder import Llama
    from trainer.model.initial import initialize
    from trainer.optim.adamw import ParameterShard, local
    from trainer.optim.muon import Muon

    config = load(run.config)
    backend = TorchNative(config)
    ours = backend.optimizer(backend.build_model(document_end_id=None))
    assert isinstance(ours, Muon)
    model = Llama(config.model, config.train.seq_len)
    initialize(model, config.model, config.seed)
    named = dict(model.named_parameters())
    shards = {name: ParameterShard(parameter=parameter) for name, parameter in named.items()}
    alone = Muon(shards, config.optimizer, model=config.model)
    present = dict(ours.parameters())
    generator = torch.Generator().manual_seed(1)
    for number in range(1, 4):
        for name, parameter in named.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            alone.gradient(name).copy_(gradient)
            if name in present:  # in this pipeline stage
                ours.gradient(name).copy_(piece(name, gradient, backend._layout))
        for optimizer in (alone, ours):
            optimizer.step(lr=1e-2, number=number)
    values, wholes = ours.tensors(), alone.tensors()
    matrices = [name for name in values if "layers." in name and wholes[name].ndim == 2]
    assert len(matrices) == 2 * 4 * len(backend._layout.layers)
    for name in matrices:
        expected = piece(name.partition(".")[2], wholes[name], backend._layout)
        torch.testing.assert_close(local(values[name]), expected, rtol=0, atol=0, msg=f"{run.root}: {name}")


def gpu_speed(run: RunPaths, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each process measures of its device, which is a CPU here, but a GPU for the libraries in ``path``."""
    from types import SimpleNamespace

    from trainer.backends.torch_native import TorchNative
    from trainer.gpu_node import measure

    backend = TorchNative(load(run.config))
    sys.path.append(job["path"])
    named = SimpleNamespace(name="NVIDIA H200", uuid=f"0000000{backend.rank}")
    torch.cpu.get_device_properties = lambda device: named  # type: ignore[attr-defined]
    return backend.gather(measure(backend, size=64, seconds=0.0, exchange_bytes=1 << 16))


_WORK = {
    "gpu_speed": gpu_speed,
    "train": train,
    "drift": drift,
    "exchanges": exchanges,
    "formats": formats,
    "weights": weights,
    "corruption": corruption,
    "muon": muon,
}


def _do(job: dict[str, Any]) -> Any:
    os.environ.update({"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], **job.get("env", {})})
    # It may hold the device mesh of an earlier job, which FSDP of PyTorch 2.14 refuses. PyTorch 2.9 has another name.
    getattr(tensor_debug, "_clear_sharding_prop_cache", lambda: None)()
    return _WORK[job["work"]](RunPaths(Path(job["run"])), job)


def _do_in_fork(job: dict[str, Any], folder: Path) -> Any:
    """Do a job in a new process, which has what this one has imported and cached, and process groups of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # gloo's threads end with the last user of a group; a process that forks should have none
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        processes.end_with_parent(parent)
        _meet_in(folder / "fork")
        code = 1
        try:
            code = run_main(lambda: _do(job) or 0)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _meet_in(folder / "later")
    if "kill_rank" not in job:
        assert code == 0, code
    elif job["kill_rank"] == int(os.environ["RANK"]):
        assert code == -signal.SIGKILL
    else:
        assert code > 0, "a process ends if another one dies"


def _meet_in(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[JOB_FOLDER_ENV] = os.fspath(folder)


def main() -> int:
    """Do the jobs of each file, until the process that writes them ends."""
    from trainer.parallel import layout

    layout.BUCKET_ENTRIES = 5_000  # several buckets of a small model
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    for number in itertools.count(1):
        file = folder / f"{number}.json"
        while not file.exists():
            os.kill(parent, 0)
            time.sleep(_POLL_S)
        jobs = [(folder / f"{number}-{place}", job) for place, job in enumerate(files.read_json(file))]
        results = [_do_in_fork(job, own) if job.get("fork") else _do(job) for own, job in jobs]
        if os.environ.get("RANK", "0") == "0":
            files.write_json(folder / f"{number}.done", results)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
