"""What the workflows run of others cannot change behind our back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: str(path.name))
def test_an_action_is_named_by_its_commit(workflow: Path) -> None:
    """A tag may be moved to other code; the comment says which version the commit was."""
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_a_version_of_an_action_is_one_commit() -> None:
    pairs = {
        pair
        for path in WORKFLOWS
        for pair in re.findall(r"uses: (\S+)@(\S+)", path.read_text(encoding="utf-8"))
    }
    assert len(pairs) == len(dict(pairs))
