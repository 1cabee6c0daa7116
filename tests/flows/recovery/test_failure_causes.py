"""The cause of an attempt's end, from its status, its error and its log."""

from __future__ import annotations

from typing import get_args

import pytest

from flows.launch.base import Status, Verdict
from flows.recovery.failure_causes import (
    Cause,
    Ending,
    cause_of_log,
    classify,
    failed_host,
    hung_ranks,
    last_exception,
    names_no_cause,
)
from hlatctl.run import memory
from hlatctl.run.errors import (
    DISK_FULL,
    NONFINITE,
    STORAGE_AWAY,
    ConfigError,
    DataError,
    HlatctlError,
    StorageError,
    TrainingError,
)
from hlatctl.run.state import AttemptState

SIGKILL_LOG = """[default0]:[rank0]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:555] Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
trainer FAILED
Failures:
  host      : node-a
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4710)
Root Cause (first observed failure):
  host      : node-b
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
"""
CRASH_LOG = """[default1]:[rank1]: {line}
[default0]:[rank0]: RuntimeError: [1] [/a/pair.cc:555] Connection closed by peer [127.0.0.1]:46823
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
  exitcode  : 1 (pid: 5)
"""


def attempt(*, last_step: int = 7, hang: str = "", oom_kills: int | None = None) -> AttemptState:
    return AttemptState(1, {}, 0.0, resumed_from_step=0, last_step=last_step, hang=hang, oom_kills=oom_kills)


def ending(
    log: str = "",
    *,
    exit_code: int | None = 1,
    error: HlatctlError | None = None,
    train_stopped: str = "",
    of: AttemptState | None = None,
    oom_kills: int | None = None,
    stop_requested: bool = False,
) -> Ending:
    status = Status(state="lost") if exit_code is None else Status(state="failed", exit_code=exit_code)
    return classify(
        status=status,
        attempt=of or attempt(),
        train_stopped=train_stopped,
        error=error,
        log_tail=log,
        stop_requested=stop_requested,
        oom_kills=oom_kills,
    )


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: no", "crashed"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out_of_memory"),
        ("RuntimeError: [enforce fail at a.cpp:127] DefaultCPUAllocator: can't allocate memory", "out_of_memory"),
        ("MemoryError", "out_of_memory"),
        (
            "RuntimeError: [/g/unbound_buffer.cc:81] Timed out waiting 900000ms for recv operation to complete",
            "collective_timeout",
        ),
        (
            "DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
            "collective_timeout",
        ),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
            "port: 37510, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "port_in_use",
        ),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("IndexError: index out of range in self", "data_error"),
    ],
)
def test_the_first_exception_gives_the_cause_whatever_other_processes_print(line: str, cause: Cause) -> None:
    end = ending(CRASH_LOG.format(line=line))
    assert (end.cause, end.evidence) == (cause, line)


@pytest.mark.parametrize(
    ("error", "last_step", "cause"),
    [
        (DataError("data.path=x: gone"), 0, "error"),
        (DataError("part-0.arrow: damaged"), 7, "data_error"),
        (StorageError("any words", code=DISK_FULL), 7, "disk_full"),
        (StorageError("/runs: needs 4096 bytes, 17 are free: No space left on device"), 7, "error"),
        (StorageError("/runs: can't be written (Read-only file system)"), 7, "error"),
        (TrainingError("any words", code=NONFINITE), 7, "nonfinite"),
        (ConfigError("seed=x"), 7, "error"),
        (DataError("s3://bucket/a.arrow: can't be read", code=STORAGE_AWAY), 0, "storage_away"),
        (DataError("s3://bucket/a.arrow: can't be read", code=STORAGE_AWAY), 7, "storage_away"),
    ],
)
def test_our_own_errors_are_classified_by_type_and_code_whatever_their_text(
    error: HlatctlError, last_step: int, cause: Cause
) -> None:
    end = ending(SIGKILL_LOG, error=error, of=attempt(last_step=last_step))
    assert (end.cause, end.evidence) == (cause, f"{type(error).__name__}: {error.message}")


@pytest.mark.parametrize(
    "log",
    [
        "sh: 1: exec: apptainer: not found\nsrun: error: n3: task 0: Exited with exit code 127\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
        "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T14:28:27 ***",
        'sh: 1: exec: apptainer: not found\nTry "srun --help" for more information',
    ],
)
def test_the_reason_of_an_end_is_what_srun_prints_no_summary_of(log: str) -> None:
    assert last_exception(log) == "its last output: sh: 1: exec: apptainer: not found"


def _summary(host: str, code: int, exception: str) -> str:
    cause = f"Root Cause (first observed failure):\n  host      : {host}\n  exitcode  : {code} (pid: 7)\n"
    return f"[rank0]: {exception}\n{cause}"


def test_a_killed_process_comes_before_those_whose_connections_broke_even_if_its_node_ends_later() -> None:
    broken = _summary("node-a", 1, "RuntimeError: [/g/pair.cc:5] Connection closed by peer [::1]:4")
    killed = _summary("node-b", -9, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    for log in (broken + killed, killed + broken):
        assert (ending(log).cause, failed_host(log)) == ("killed", "node-b")
    aborted = _summary("node-b", -6, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    assert ending(broken + aborted).cause == "crashed"
    wrong = _summary("node-a", 1, "ValueError: no")
    assert (ending(wrong + killed).cause, failed_host(wrong + killed)) == ("crashed", "node-a")


@pytest.mark.parametrize(
    ("text", "is_secondary"),
    [
        ("Net : Connection closed by remote peer user<50260>", True),
        ("Cuda failure 'uncorrectable ECC error encountered'", False),
    ],
)
def test_an_exception_of_nccl_is_explained_by_its_last_error(text: str, is_secondary: bool) -> None:
    """Texts of github.com/NVIDIA/nccl/issues/1514: a rank may call the end of another one an internal error."""
    log = (
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1275, internal error\n"
        f"[rank0]: ncclInternalError: Internal check failed.\n[rank0]: Last error:\n[rank0]: {text}\n"
    )
    assert names_no_cause(log) == is_secondary
    assert cause_of_log(log) == (None if is_secondary else "device_failed")


HERE, OTHER = "/src/trainer/data/loader.py", "/venv/torch/distributed/distributed_c10d.py"


def _stack(path: str, function: str) -> str:
    evidence = 'Current thread 0x1 (most recent call first):\n  File "/src/trainer/process.py", line 1 in _write\n'
    return f'{evidence}\nThread 0x2 (most recent call first):\n  File "{path}", line 7 in {function}\n'


@pytest.mark.parametrize(
    ("stacks", "world_size", "hung"),
    [
        ([_stack(OTHER, "all_reduce"), _stack(HERE, "next")], 2, [1]),
        ([_stack(OTHER, "all_reduce"), _stack(OTHER, "recv")], 2, []),
        ([_stack(OTHER, "all_reduce")] * 3 + [_stack(OTHER, "recv")], 4, [3]),
        ([_stack(HERE, "synchronize")] * 3 + [_stack(HERE, "next")], 4, [3]),
        ([_stack(HERE, "synchronize")] * 4, 4, []),
        ([_stack(OTHER, "all_reduce")], 2, [1]),
        ([_stack(HERE, "a"), _stack(HERE, "b")], 2, []),
        ([], 2, []),
    ],
)
def test_the_stacks_of_a_hang_show_for_which_ranks_the_others_waited(
    stacks: list[str], world_size: int, hung: list[int]
) -> None:
    assert hung_ranks(dict(enumerate(stacks)), world_size) == hung


def test_a_killed_process_comes_first_if_torchrun_saw_its_end_after_a_broken_connection() -> None:
    others = "Failures:\n  host      : node-b\n  exitcode  : -9 (pid: 8)\n"
    broken = others + _summary("node-a", 1, "RuntimeError: [/g/pair.cc:537] Connection reset by peer [::1]:4")
    assert (ending(broken).cause, failed_host(broken)) == ("killed", "node-b")
    wrong = others + _summary("node-a", 1, "ValueError: no")
    assert (ending(wrong).cause, failed_host(wrong)) == ("crashed", "node-a")


def test_a_process_that_torchrun_killed_since_it_did_not_end_is_not_the_first_to_fail() -> None:
    times = {"first": "2026-11-26_10:18:52", "late": "2026-11-26_10:19:22"}
    text = "Failures:\n  time      : {late}\n  host      : node-a\n  exitcode  : -9 (pid: 8)  (SIGKILL)\n"
    text += (
        "Root Cause (first observed failure):\n  time      : {first}\n  host      : node-a\n  exitcode  : 1 (pid: 7)\n"
    )
    broken = "RuntimeError: Connection reset by peer\n"
    assert ending(broken + text.format(**times)).cause == "crashed"
    assert ending(broken + text.format(first=times["first"], late="2026-11-26_10:18:53")).cause == "killed"


def test_the_signal_is_that_of_the_process_that_failed_first() -> None:
    assert ending(SIGKILL_LOG).evidence == "a trainer process died of signal 9"
    assert ending("", exit_code=137).evidence == "the job died of signal 9"
    assert (ending("", exit_code=137).cause, ending(exit_code=None).cause) == ("killed", "lost")
    assert failed_host(SIGKILL_LOG) == "node-b"


def test_sigkill_means_out_of_memory_only_if_the_kernel_has_counted_a_kill_meanwhile() -> None:
    before = attempt(oom_kills=3)
    assert ending(SIGKILL_LOG, of=before, oom_kills=3).cause == "killed"
    assert ending(SIGKILL_LOG, of=attempt(), oom_kills=4).cause == "killed", "the count before is unknown"
    end = ending(SIGKILL_LOG, of=before, oom_kills=4)
    assert end.cause == "out_of_memory"
    assert end.evidence.endswith("and the kernel killed a process because memory ran out")


def test_a_stop_that_nobody_requested_is_a_preemption() -> None:
    assert ending(exit_code=75, train_stopped="stop").cause == "preempted"
    assert ending(exit_code=75, train_stopped="stop", stop_requested=True).cause == "stopped"


def test_wrong_numbers_are_the_cause_whatever_the_processes_do_after_that_finding() -> None:
    wrong = attempt(hang="no step after step 7 for 60 s")
    wrong.corruption = "rank 3 (cuda:3 on n1) computed different outputs"
    end = ending(SIGKILL_LOG, error=TrainingError("after step 7: any words"), of=wrong)
    assert (end.cause, end.evidence) == ("corruption", wrong.corruption)


def test_an_attempt_that_was_ended_as_hung_has_the_cause_hang_however_it_died() -> None:
    hung = attempt(hang="no step after step 7 for 60 s")
    assert ending(SIGKILL_LOG, of=hung).cause == "hang"
    assert ending(exit_code=None, of=hung).cause == "hang"
    assert ending(train_stopped="finished", of=hung).cause == "finished", "it had finished its last step"


def test_equal_failures_have_equal_signatures() -> None:
    one = "RuntimeError: rank 3: tensor at 0x7f3a10 (/tmp/a/b.py:17) is not of 512 rows"
    other = "RuntimeError: rank 0: tensor at 0x11ff (/home/x/b.py:19) is not of 640 rows"
    signatures = {ending(CRASH_LOG.format(line=line)).signature for line in (one, other)}
    assert signatures == {"crashed: RuntimeError: rank <n>: tensor at <address> (<path>:<n>) is not of <n> rows"}
    killed, aborted = ending("", exit_code=137).signature, ending("", exit_code=134).signature
    assert (killed, aborted) == ("killed: the job died of signal 9", "killed: the job died of signal 6")


@pytest.mark.parametrize("log", ["", "\n\n", "no exception at all"])
def test_an_empty_log_is_a_crash(log: str) -> None:
    assert ending(log).cause == "crashed"
    assert ending(log).evidence in ("no output", "its last output: no exception at all")


@pytest.mark.parametrize(
    ("verdict", "train_stopped", "hang", "stop_requested", "cause"),
    [
        ("node_failed", "", "", False, "node_failed"),
        ("node_failed", "", "no step", False, "node_failed"),
        ("cancelled", "", "no step", False, "hang"),
        ("cancelled", "stop", "has not ended", True, "stopped"),
        ("cancelled", "stop", "has not ended", False, "preempted"),
        ("cancelled", "rollback", "has not ended", False, "rollback"),
        ("cancelled", "stop", "", False, "cancelled"),
        ("cancelled", "stop", "", True, "stopped"),
        ("preempted", "", "", False, "preempted"),
        ("time_limit", "stop", "", False, "time_limit"),
        ("out_of_memory", "", "", False, "out_of_memory"),
        ("preempted", "finished", "", False, "finished"),
    ],
)
def test_what_the_scheduler_says_counts_before_the_log_and_the_error(
    verdict: Verdict, train_stopped: str, hang: str, stop_requested: bool, cause: Cause
) -> None:
    end = classify(
        status=Status(state="failed", exit_code=143, verdict=verdict, blamed_hosts=("n2",), reason="NodeDown"),
        attempt=attempt(hang=hang),
        train_stopped=train_stopped,
        error=StorageError("closed"),
        log_tail=SIGKILL_LOG,
        stop_requested=stop_requested,
    )
    assert end.cause == cause
    assert ("n2 (NodeDown)" in end.evidence) == (cause == "node_failed")


def test_failures_of_two_nodes_are_not_alike() -> None:
    ends = [Ending(cause="killed", evidence="a trainer process died", hosts=(host,)) for host in ("n-1", "n-2")]
    assert ends[0].signature != ends[1].signature


def test_copies_in_memory_are_used_after_causes_that_exist_and_none_of_wrong_numbers() -> None:
    assert set(get_args(Cause)) >= memory.SAYS_NOTHING
    assert not memory.SAYS_NOTHING & {"corruption", "nonfinite", "nonfinite_weights", "rollback", "data_error"}
