"""The user's folders of configuration: what is found in them, which one wins, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from conf import folders
from conf.compose import compose, default_runs_dir, groups
from conf.folders import ENV, using
from conf.space import Variations, parse
from hlatctl.run.errors import ConfigError

MINE = "# @package _global_\ndefaults: [/experiment/quickstart]\nexperiment_name: mine\ntrain: {tokens: 1000000}\n"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configuration. The working directory is empty."""
    monkeypatch.delenv("HLATCTL_RUNS_DIR", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    written(tmp_path / "own" / "experiment" / "mine.yaml", MINE)
    return tmp_path / "own"


def test_options_and_experiments_of_a_folder_are_used_beside_ours(own: Path) -> None:
    written(own / "optimizer" / "slow.yaml", "lr: 1.0e-5\n")
    with using([own]):
        config = compose(["experiment=mine", "optimizer=slow"])
        assert "mine" in groups()["experiment"]
    assert (config.experiment_name, config.train.tokens, config.train.seq_len) == ("mine", 1_000_000, 512)
    with pytest.raises(ConfigError, match="experiment=mine: no such option"):
        compose(["experiment=mine"])


def test_the_command_line_wins_over_the_environment_and_that_over_the_working_directory(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(Path("conf/hlatctl.yaml"), "overrides: [seed=3, optimizer.beta1=0.3]\n")
    env = written(tmp_path / "env" / "hlatctl.yaml", "overrides: [seed=2, optimizer.beta1=0.2]\n").parent
    written(env / "model" / "small.yaml", "hidden_size: 64\n")
    written(own / "hlatctl.yaml", "overrides: [seed=1]\n")
    written(own / "model" / "small.yaml", "hidden_size: 32\n")
    assert compose([]).seed == 3
    monkeypatch.setenv(ENV, os.fspath(env))
    with using([own]):
        assert folders.user_folders() == [own, env, Path.cwd() / "conf"]
        config = compose(["model=small"])
        assert (config.seed, config.optimizer.beta1, config.model.hidden_size) == (1, 0.2, 32)
        assert compose(["seed=9"]).seed == 9


def test_conf_of_the_working_directory_counts_only_with_its_file(own: Path) -> None:
    written(Path("conf/experiment/mine.yaml"), MINE)
    assert folders.user_folders() == []
    written(Path("conf/hlatctl.yaml"), "")
    assert compose(["experiment=mine"]).experiment_name == "mine"


def test_a_project_names_the_folder_of_its_runs(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(Path("conf/hlatctl.yaml"), "runs_dir: its runs'\n")
    expected = Path.cwd() / "its runs'"
    assert default_runs_dir() == expected == Path(compose([]).runs_dir)
    monkeypatch.setenv("HLATCTL_RUNS_DIR", "/elsewhere")
    assert default_runs_dir() == Path("/elsewhere") == Path(compose([]).runs_dir)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("cluster: slurm\n", "cluster: unknown key", "runs_dir, overrides"),
        ("overrides: cluster=slurm\n", "must be a list", ""),
        ("overrides: [runs_dir=x]\n", "runs_dir is a key of this file", "runs_dir: DIR"),
        ("overrides: [clutser=slurm]\n", "clutser: unknown key", "cluster"),
        ("overrides: ['hydra.run.dir=x']\n", "Hydra's own settings", "--config-dir"),
        ("- list\n", "expected a mapping", "YAML"),
        ("a: [\n", "not readable as YAML", "YAML"),
        ("lr: 1\n'lr': 2\n", "has the key lr twice .line 2", "YAML"),
        ("a: " + "[" * 20_000, "not readable as YAML", "YAML"),
    ],
)
def test_a_wrong_project_file_is_refused(own: Path, text: str, message: str, hint: str) -> None:
    written(own / "hlatctl.yaml", text)
    with using([own]), pytest.raises(ConfigError, match=message) as error:
        compose([])
    assert hint in error.value.hint


def test_a_sweep_of_a_folder_keeps_the_folder_for_its_trials(own: Path) -> None:
    written(own / "sweep" / "lr.yaml", "arguments: [experiment=mine, 'optimizer.lr=0.001,0.002']\n")
    with using([own]):
        space = parse(["sweep=lr"], Path.cwd())
    assert space.config_dirs == [os.fspath(own)]
    variations = Variations(space.overrides, Path.cwd(), None, space.config_dirs)
    assert [variations.compose(point).experiment_name for point in space.grid()] == ["mine", "mine"]


def test_a_name_of_ours_is_refused(own: Path) -> None:
    written(own / "experiment" / "hlat_7b.yaml", MINE)
    with using([own]), pytest.raises(ConfigError, match="experiment=hlat_7b is one of hlatctl's") as error:
        compose([])
    assert "my_hlat_7b" in error.value.hint


def test_a_clone_of_our_repository_is_a_folder_of_configuration_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(folders.OURS, clone / "conf", ignore=shutil.ignore_patterns("__pycache__"))
    written(clone / "conf" / "hlatctl.yaml", "")
    written(clone / "conf" / "experiment" / "mine.yaml", MINE)
    for path in (clone / "conf", *(clone / "conf").rglob("*")):
        path.chmod(path.stat().st_mode | 0o020)  # umask 002
    monkeypatch.chdir(clone)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "OURS", clone / "conf")  # as where the clone itself is installed
        assert folders.checked_folders() == [clone / "conf"]
        assert folders.file_of("experiment", "mine") == clone / "conf" / "experiment" / "mine.yaml"
        assert folders.project_runs_dir() is None
    with pytest.raises(ConfigError, match="belongs to another copy of hlatctl than the one that runs") as error:
        compose([])
    assert f"remove {clone / 'conf' / 'hlatctl.yaml'}" in error.value.hint


def test_a_folder_that_is_no_group_is_refused_if_it_has_options(own: Path) -> None:
    written(own / "experiments" / "other.yaml", MINE)
    with using([own]), pytest.raises(ConfigError, match="there is no such group") as error:
        compose([])
    assert "experiment" in error.value.hint


@pytest.mark.parametrize("place", ["", "experiment", "experiment/mine.yaml"])
def test_what_others_can_write_to_is_refused(own: Path, place: str) -> None:
    (own / place).chmod(0o777)
    with using([own]), pytest.raises(ConfigError, match=r"other users may write there \(mode 0777\)") as error:
        compose([])
    assert "chmod -R go-w" in error.value.hint


def test_what_can_not_be_read_safely_is_refused(own: Path, tmp_path: Path) -> None:
    file = own / "experiment" / "mine.yaml"
    file.unlink()

    def refused(message: str) -> None:
        with using([own]), pytest.raises(ConfigError, match=message) as error:
            compose([])
        assert error.value.hint
        file.unlink()

    os.mkfifo(file)
    refused("not a regular file")
    file.symlink_to(written(tmp_path / "secret.yaml", MINE))
    refused("is a link out of")
    file.symlink_to(file)
    refused("can't be read")
    with file.open("wb") as large:
        large.truncate(2**30)
    refused("has 1,073,741,824 bytes, the limit is 1,048,576")
    file.write_bytes(b"\xff\xfe: 1")
    refused("not readable as YAML")
    file = own / "experiment" / os.fsdecode(b"\xff.yaml")
    file.write_text(MINE)
    refused("an option's name has letters")


def test_a_missing_folder_and_paths_as_options_are_refused(own: Path) -> None:
    with using([own / "none"]), pytest.raises(ConfigError, match="is not a folder of configuration"):
        compose([])
    with pytest.raises(ConfigError, match=r"experiment=\.\./\.\./etc/passwd: no such option") as error:
        compose(["experiment=../../etc/passwd"])
    assert "quickstart" in error.value.hint
    with pytest.raises(ConfigError, match="Hydra's own settings are fixed"):
        compose([f"hydra.searchpath=[{own}]"])


@pytest.mark.parametrize("place", ["schema.yaml", "experiment/deep/other.yaml"])
def test_a_file_that_is_no_option_is_refused_if_it_would_be_used(own: Path, place: str) -> None:
    written(own / place, "seed: 5\n")
    if "deep" in place:
        written(own / "experiment" / "mine.yaml", MINE.replace("quickstart]", "quickstart, /experiment/deep/other]"))
    with using([own]), pytest.raises(ConfigError, match=r"only GROUP/OPTION.yaml in .* can be used"):
        compose(["experiment=mine"])


def test_our_own_files_may_be_below_a_folder_of_the_user() -> None:
    with using([Path("/")]):
        folders.require_options([folders.OURS / "model" / "llama_tiny.yaml"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: &a {lr: *a}", "contains an alias of a value that it is part of"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 9)), "10,000 values"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200)), "deeper than 100 levels"),
        ("lr: " + "[" * 30_000 + "]" * 30_000, "deeper than 100 levels"),
        ("\n".join("  " * i + "a:" for i in range(200)), "deeper than 100 levels"),
        (f"lr: [{'1,' * 100_000}]", "10,000 values"),
        (f"lr: {'1:' * 100_000}1", "the number 1:1:1:1:1:1:1:1:1:1:… is out of range"),
        ("lr: " + "1:" * 3000 + "1.0", "out of range"),
    ],
)
def test_yaml_whose_values_would_fill_the_memory_is_refused(own: Path, text: str, message: str) -> None:
    written(own / "experiment" / "mine.yaml", text)
    with using([own]), pytest.raises(ConfigError, match=f"mine.yaml: not readable as YAML .*{message}"):
        compose(["experiment=mine"])


def test_yaml_may_use_aliases(own: Path) -> None:
    written(own / "experiment" / "mine.yaml", f"{MINE}\nbackend: {{env: {{A: &a shared, B: *a}}}}\n")
    with using([own]):
        assert compose(["experiment=mine"]).backend.env["B"] == "shared"


def test_references_that_multiply_are_refused(own: Path) -> None:
    lines = "".join(f"  A{i}: {f'${{backend.env.A{i - 1}}}' * 10}\n" for i in range(1, 9))
    written(own / "experiment" / "mine.yaml", f"# @package _global_\nbackend:\n env:\n  A0: {'x' * 1000}\n{lines}")
    with using([own]), pytest.raises(ConfigError, match="become too long"):
        compose(["experiment=mine"])


def test_references_that_are_resolved_again_and_again_are_refused_early(own: Path) -> None:
    lines = "".join(f"  A{i}: {f'${{backend.env.A{i - 1}}}' * 2}\n" for i in range(1, 11))
    written(own / "experiment" / "mine.yaml", f"# @package _global_\nbackend:\n env:\n  A0: x\n{lines}")
    with using([own]), pytest.raises(ConfigError, match="become too long"):
        compose(["experiment=mine"])


@pytest.mark.parametrize("value", ["[" * 10_000 + "]" * 10_000, "{a:" * 200, f"[{'1,' * 10_000}]"])
def test_overrides_that_take_minutes_to_parse_are_refused(own: Path, value: str) -> None:
    for refused in (lambda: compose([f"eval.tasks={value}"]), lambda: parse([f"optimizer.lr={value}"], own)):
        with pytest.raises(ConfigError, match=r"its value (is nested deeper|has more) than"):
            refused()
