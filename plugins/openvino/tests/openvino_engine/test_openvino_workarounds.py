"""A workaround that can go is found out."""

from __future__ import annotations

from llmserve_openvino.library import openvino


def test_openvino_has_no_public_name_for_paged_attention() -> None:
    """Once it has, ``use_paged_attention`` is not needed."""
    public = {*dir(openvino.passes), *dir(openvino)}
    assert not {name for name in public if "paged" in name.lower()}
