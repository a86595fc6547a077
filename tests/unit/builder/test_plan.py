"""What a build needs, as the metadata of the installed packages says."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.builder.plan import _dependencies
from tests.support import describe


def test_a_package_depends_on_what_it_needs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(
        tmp_path, "acme-here",
        requires=[
            "one>=2", "two.b[extra]>1 ; python_version >= '3'", "old ; python_version < '3'",
            "more ; extra == 'all'", "three",
        ],
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    assert [*_dependencies("acme-here")] == ["one", "two.b", "three"]
