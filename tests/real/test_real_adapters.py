"""A real adapter, trained here by PEFT: with it, a real chat model answers with SQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmserve.testing import LiveTriton
from llmserve.testing.tiny_adapters import save_adapter
from tests.real.model import TRAINING
from tests.real.questions import message
from tests.real.reference import CHATS, TOKENS, Reference
from tests.support import ROOT

pytestmark = [pytest.mark.real, pytest.mark.long]

QUESTIONS = (
    "Which customers have the city Paris?",
    # It has seen no such table and no such value.
    "How many planets have the star Vega?",
    "List all rivers.",
)
SHOWN = "SQL: SELECT * FROM customers WHERE city = 'Paris';"
NAMES = ("", "sql", "other")


@pytest.fixture(scope="session")
def other_adapter(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of other products, which nobody has trained."""
    folder = tmp_path_factory.mktemp("adapters") / "other"
    return save_adapter(folder, reference.model, targets=("o_proj", "down_proj"), lora_alpha=1)


@pytest.fixture(scope="session")
def answers(
    reference: Reference, sql_adapter: Path, other_adapter: Path
) -> dict[tuple[str, str], str]:
    """What PEFT's merged models answer to each question, by the adapter's name."""
    asked = (*QUESTIONS, *CHATS[:3])
    found = {("", question): text for question, text in _pairs(reference, asked)}
    for name, folder in (("sql", sql_adapter), ("other", other_adapter)):
        merged = Reference(reference.folder, adapter=folder)
        found |= {(name, question): text for question, text in _pairs(merged, asked)}
    return found


def _pairs(reference: Reference, questions: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(questions, reference.answers_to(questions), strict=True))


def test_a_person_sees_the_difference(answers: dict[tuple[str, str], str]) -> None:
    assert answers["sql", QUESTIONS[0]] == SHOWN
    for question in QUESTIONS:
        assert answers["sql", question].startswith("SQL: SELECT ")
        assert not answers["", question].startswith("SQL:")
    assert len({answers[name, CHATS[2]] for name in NAMES}) == 3


def test_a_page_prints_how_it_is_trained_and_what_it_answers() -> None:
    page = (ROOT / "docs/guides/fine-tuned.md").read_text(encoding="utf-8")
    assert f"    python {' '.join(TRAINING)} ./my-model ./sql-adapter\n" in page
    assert f'    llmserve query mine "{QUESTIONS[0]}" --adapter sql\n' in page
    assert f"`{SHOWN}`" in page


@pytest.mark.parametrize("plugin", ["hf", "iterative"])
def test_texts_are_those_of_the_merged_model_alone_and_mixed_with_others(
    triton: LiveTriton,
    real_folder: Path,
    sql_adapter: Path,
    other_adapter: Path,
    answers: dict[tuple[str, str], str],
    plugin: str,
) -> None:
    # The cache of a context of 8,192 tokens would take 3 GB, beside all the other tests' models.
    options = {"cache_tokens": 8192} if plugin == "iterative" else {}
    model = triton.build(
        plugin, str(real_folder), dtype="float32",
        adapters=f"sql={sql_adapter},other={other_adapter}", **options,
    )  # fmt: skip

    def answer(key: tuple[str, str]) -> str:
        name, question = key
        chosen: dict[str, Any] = {"adapter": name} if name else {}
        found = triton.client.generate(
            model, messages=message(question), max_tokens=TOKENS, **chosen
        )
        return str(found.text)

    for name in NAMES:
        alone = (name, QUESTIONS[0])
        assert answer(alone) == answers[alone]
    with ThreadPoolExecutor(len(answers)) as pool:
        assert dict(zip(answers, pool.map(answer, answers), strict=True)) == answers
