"""The settings of a simulated cluster: from the command line, from profiles, and of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf import folders, simulation
from conf.compose import compose
from conf.schema import FailureRatesConfig, SimulationConfig
from hlatctl.run.errors import ConfigError
from hlatctl.run.paths import RunPaths


def test_its_settings_are_taken_out_of_the_overrides_of_the_run() -> None:
    typed = ["optimizer.lr=1e-3", "simulation.seed=7", "simulation.failures.nan=0", "simulation.step_events=null"]
    others, settings = simulation.split(typed)
    assert others == ["optimizer.lr=1e-3", "cluster.launcher=simulated"]
    assert settings == SimulationConfig(seed=7, step_events=None, failures=FailureRatesConfig(nan=0.0))


def test_a_profile_stands_for_its_values_and_later_values_win(tmp_path: Path) -> None:
    (tmp_path / "simulation").mkdir()
    (tmp_path / "simulation" / "ours.yaml").write_text("person_s: 60\nfailures:\n  hang: 1\n")
    with folders.using([tmp_path]):
        _, settings = simulation.split(["simulation=llama3_405b", "simulation=ours", "simulation.person_s=90"])
    assert (settings.step_s, settings.person_s, settings.failures.hang, settings.spare_nodes) == (6.2, 90.0, 1.0, 16)
    assert settings.failures.hardware == pytest.approx(308 * 1000 / (54 * 24 * 2048), rel=1e-3)


@pytest.mark.parametrize("name", folders.names("simulation"))
def test_the_profiles_are_valid(name: str) -> None:
    simulation.split([f"simulation={name}"])


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("simulation.repair_s=-1.0", "simulation.repair_s=-1.0: must be at least 0", "default is"),
        ("simulation.seed=x", "simulation.seed=.x.: must be a whole number", ""),
        ("simulation.sed=1", "simulation.sed: unknown key", "did you mean simulation.seed?"),
        ("simulation.failures=1", "simulation.failures: unknown key", "simulation"),
        ("simulation.seed=1,2", "simulation.seed=1,2: is a setting of the simulated cluster", ""),
        ("~simulation.seed", "~simulation.seed: can't be removed", "leave it out"),
        ("simulation.seed", "OVERRIDES=simulation.seed: must be KEY=VALUE", "simulation.seed=2"),
        ("simulation=llama3", "simulation=llama3: no such profile", "did you mean simulation=llama3_405b?"),
    ],
)
def test_a_wrong_setting_is_named(text: str, error: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        simulation.split([text])
    assert hint in caught.value.hint


@pytest.mark.parametrize("sign", ["+", "++"])
def test_its_settings_may_be_written_as_additions(sign: str) -> None:
    assert simulation.split([f"{sign}simulation.seed=7"]) == ([simulation.OVERRIDE], SimulationConfig(seed=7))


def test_a_profile_may_have_numbers_as_overrides_have_them(tmp_path: Path) -> None:
    (tmp_path / "simulation").mkdir()
    (tmp_path / "simulation" / "ours.yaml").write_text("storage_bytes_per_s: 1e12\n")
    with folders.using([tmp_path]):
        assert simulation.split(["simulation=ours"])[1].storage_bytes_per_s == 1e12


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("sed: 1\n", "simulation.sed: unknown key"),
        ("failures: '{nan: 1}'\n", "simulation.failures: unknown key"),
        ("seed: 1\nseed: 2\n", "has the key seed twice .line 2"),
    ],
)
def test_an_error_in_a_profile_names_its_file(tmp_path: Path, content: str, error: str) -> None:
    (tmp_path / "simulation").mkdir()
    (tmp_path / "simulation" / "ours.yaml").write_text(content)
    with folders.using([tmp_path]), pytest.raises(ConfigError, match=rf"ours\.yaml: .*{error}"):
        simulation.split(["simulation=ours"])


@pytest.mark.parametrize("text", ["simulation.seed=1", "simulation=llama3_405b"])
def test_a_real_run_takes_none_and_the_error_says_what_does(text: str) -> None:
    with pytest.raises(ConfigError, match="describes the simulated cluster of a new dry run") as caught:
        compose([text])
    assert "--dry-run" in caught.value.hint


def test_a_run_keeps_them_and_has_the_defaults_without_a_file(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert simulation.of_run(run) == SimulationConfig()
    settings = SimulationConfig(seed=3, failures=FailureRatesConfig(nan=0.5))
    simulation.write(run, settings)
    assert simulation.of_run(run) == settings
    run.simulation.write_text(run.simulation.read_text().replace("seed: 3", "seed: 4"))
    with pytest.raises(ConfigError, match=r"simulation\.yaml") as caught:
        simulation.of_run(run)
    assert "remove it" in caught.value.hint  # not `hlatctl resume`, which fails again
    run.simulation.unlink()
    run.simulation.symlink_to("missing")
    with pytest.raises(ConfigError, match=r"simulation\.yaml"):
        simulation.of_run(run)
