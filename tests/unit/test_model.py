"""The model that Triton loads: what it makes of a manifest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmserve.runtime.model import TritonPythonModel
from llmserve.testing import FakeBackendUtils


@pytest.mark.parametrize("schema", [None, 0, 99])
def test_a_manifest_of_another_form_is_told_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeBackendUtils())
    papers = {"llmserve": "9.9", "schema": schema}
    (tmp_path / "llmserve.json").write_text(json.dumps(papers))
    arguments = {"model_repository": str(tmp_path), "model_version": "1"}
    with pytest.raises(RuntimeError, match=r"built by llmserve 9\.9.*build it again"):
        TritonPythonModel().initialize(arguments)


def test_unloading_what_never_loaded_is_no_matter() -> None:
    TritonPythonModel().finalize()
