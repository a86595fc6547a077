"""What comparisons of weights have found is kept, and believed only if it must still be right."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.home import HOME
from llmserve.builder.weights.kept_answers import comparing_code, find_answer, keep_answer

ANSWER: dict[str, Any] = {"nan": [], "missing": ["a.weight"], "mismatched": []}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME, str(tmp_path / "home"))


def test_an_answer_is_found_by_its_question(tmp_path: Path) -> None:
    assert find_answer("one") is None
    keep_answer("one", ANSWER)
    assert find_answer("one") == ANSWER
    assert find_answer("another") is None
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("why", ["unchecked", "unknown", "misfit"])
def test_what_another_day_may_answer_otherwise_is_not_kept(why: str) -> None:
    keep_answer("one", {"nan": [], why: "something"})
    assert find_answer("one") is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"nan": []}', json.dumps({**ANSWER, "missing": "a.weight"}), "[" * 9000]
)
def test_a_damaged_answer_is_none(content: str, tmp_path: Path) -> None:
    keep_answer("one", ANSWER)
    (file,) = (tmp_path / "home" / "comparisons").iterdir()
    file.write_text(content, encoding="utf-8")
    assert find_answer("one") is None
    keep_answer("one", ANSWER)
    assert find_answer("one") == ANSWER


def test_what_others_may_write_is_not_believed(tmp_path: Path) -> None:
    keep_answer("one", ANSWER)
    (tmp_path / "home").chmod(0o777)
    assert find_answer("one") is None


def test_without_a_folder_nothing_is_kept_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    keep_answer("one", ANSWER)
    assert find_answer("one") is None


def test_an_edited_transformers_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "transformers" / "models" / "gpt2" / "modeling_gpt2.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    module.write_text("layers = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    before = [*comparing_code()]
    assert before == [*comparing_code()]
    keep_answer("one", ANSWER)
    module.write_text("layers = 2\n", encoding="utf-8")
    os.utime(module, ns=(1, 1))
    assert before != [*comparing_code()]
    assert find_answer("one") is None


def test_the_newest_answers_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "comparisons"
    keep_answer("one", ANSWER)
    for number in range(600):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", (number, number))
    keep_answer("another", ANSWER)
    assert len([*folder.iterdir()]) == 500
    assert find_answer("one") == find_answer("another") == ANSWER
