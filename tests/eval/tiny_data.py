"""A few invented items of each dataset of the whole table, in `eval.data_dir`'s layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.tasks import core

_ARC = [
    {
        "id": "1",
        "question": "What do plants need to grow?",
        "answerKey": "B",
        "choices": {"text": ["stone", "light", "noise", "iron"], "label": ["A", "B", "C", "D"]},
    },
    {
        "id": "2",
        "question": "Which is the hottest?",
        "answerKey": "3",
        "choices": {"text": ["ice", "water", "fire"], "label": ["1", "2", "3"]},
    },
]
_MC = {"choices": ["The sky is blue.", "The sky is green.", "The sky is made of wood."], "labels": [1, 0, 0]}
_TRIVIA = [
    {
        "question": f"Which number comes after {n}",
        "answer": {"value": str(n + 1), "aliases": [str(n + 1), f"number {n + 1}"]},
    }
    for n in range(8)
]
_NQ = [{"question": f"how many legs have {n} cats", "answer": [str(4 * n), f"{4 * n} legs"]} for n in range(1, 9)]
_MMLU = [
    {"question": f"What is {n} plus 1?", "subject": "anatomy", "answer": 1, "choices": [str(n), str(n + 1), "9", "7"]}
    for n in range(6)
]
_GSM8K = [
    {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
    for n in range(1, 13)
]
_BIASES = "race-color gender socioeconomic nationality religion age sexual-orientation physical-appearance disability"
_CROWS = [
    {
        "id": n,
        "sent_more": f"The nurse of ward {n} was kind.",
        "sent_less": f"The guard of ward {n} was kind.",
        "stereo_antistereo": "stereo",
        "bias_type": _BIASES.split()[n % 9],
    }
    for n in range(27)
]
_HELLASWAG = [
    {
        "ind": n,
        "activity_label": "Cooking",
        "ctx_a": "A man stands in a kitchen.",
        "ctx_b": "he",
        "label": str(n),
        "endings": ["cuts bread.", "flies away.", "reads the sea [title] twice.", "is a pan."],
    }
    for n in range(3)
]
_FILES: dict[str, list[dict[str, Any]]] = {
    "mmlu/anatomy/test": _MMLU,
    "mmlu/anatomy/dev": _MMLU[:5],
    "mmlu/virology/test": _MMLU[:3],
    "mmlu/virology/dev": _MMLU[:5],
    "bbh/navigate": [
        {"input": f"Walk {n} steps. Are you back?\nOptions:\n- Yes\n- No", "target": "No"} for n in range(3)
    ],
    "gsm8k/test": _GSM8K[:4],
    "gsm8k/train": _GSM8K,
    "crows_pairs/test": _CROWS,
    "piqa/validation": [
        {"goal": "Open a jar.", "sol1": "Turn the lid.", "sol2": "Turn the jar's light on.", "label": 0}
    ]
    * 2,
    "hellaswag/validation": _HELLASWAG,
    "winogrande/winogrande_xl/validation": [
        {
            "sentence": "The cup did not fit in the box because the _ was too big.",
            "option1": "cup",
            "option2": "box",
            "answer": "1",
        }
    ]
    * 2,
    "ai2_arc/ARC-Easy/test": _ARC,
    "ai2_arc/ARC-Challenge/test": _ARC[:1],
    "openbookqa/main/test": [
        {
            "id": "1",
            "question_stem": "The sun is",
            "answerKey": "A",
            "choices": {"text": ["a star", "a cup", "a dog", "ice"], "label": ["A", "B", "C", "D"]},
        }
    ]
    * 2,
    "nq_open/validation": _NQ,
    "trivia_qa/rc.nocontext/validation": _TRIVIA[:3],
    "trivia_qa/rc.nocontext/train": _TRIVIA,
    "boolq/validation": [{"question": "is snow cold", "passage": "Snow is frozen water.", "idx": 0, "label": 1}] * 2,
    "truthful_qa/multiple_choice/validation": [
        {"question": "What colour has the sky?", "mc1_targets": _MC, "mc2_targets": _MC}
    ]
    * 2,
}


def write(folder: Path) -> Path:
    for name, items in _FILES.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return folder


_NUMBERS = range(14)
_BUNDLE: dict[str, list[dict[str, Any]]] = {
    "multiple_choice": [
        {
            "query": f"Question: {n} and {n}?",
            "choices": [f"{2 * n} apples", f"{2 * n} apricots", f"{n} pears"],
            "gold": n % 3,
        }
        for n in _NUMBERS
    ],
    "schema": [
        {
            "context_options": [f"Ann has {n} dogs, Ann", f"Bob has {n} dogs, he"],
            "continuation": "is happy.",
            "gold": n % 2,
        }
        for n in _NUMBERS
    ],
    "language_modeling": [{"context": f" {n} plus {n} is ", "continuation": str(2 * n)} for n in _NUMBERS],
}


def write_bundle(folder: Path) -> Path:
    """Write a bundle of CORE with 14 items in each file."""
    for row in core.ROWS:
        path = folder / row.place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in _BUNDLE[row.kind]), encoding="utf-8")
    return folder
