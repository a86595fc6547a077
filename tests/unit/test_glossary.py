"""The glossary has every public class, and nothing that is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"

# Type aliases.
TYPES = {"Severity", "Value"}


def public_classes() -> set[str]:
    lines = (ROOT / "llmserve" / "api.txt").read_text(encoding="utf-8").splitlines()
    names = {line.partition("(")[0].partition(":")[0].rpartition(".")[2] for line in lines}
    # Errors say themselves what they are of, and what is for tests is documented there.
    return {
        name
        for name in names
        if re.fullmatch(r"(?:[A-Z]+[a-z]+)+", name)
        and not name.endswith(("Error", "Conformance"))
        and not name.startswith(("Fake", "Byte", "Live", "Scripted"))
        and name not in TYPES
    }


def test_every_public_class_has_its_word() -> None:
    words = re.findall(r"(?m)^\| \*\*(\w+)\*\* \| (.+) \|$", GLOSSARY.read_text(encoding="utf-8"))
    assert len(words) == len(dict(words)), "a word stands twice"
    assert {word for word, _ in words} == public_classes()
    assert all(len(meaning) < 120 for _, meaning in words)


# A role, and the class of that name inside Triton that fills it; a token's probability as it is
# sent and as it is read; and a script that is copied, so that it stands alone.
TWICE = {"Tokenizer", "Generator", "Formatter", "Logprob"}
COPIED = {"script.py", "script_parts.py", "value_script.py"}


def test_a_name_of_a_class_of_the_core_means_one_thing() -> None:
    places: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "llmserve").rglob("*.py")):
        if path.name in COPIED or "scaffold" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    assert {name for name, paths in places.items() if len(paths) > 1} == TWICE
