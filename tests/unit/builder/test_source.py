"""What goes wrong where the hub is asked is told in one line."""

from __future__ import annotations

import pytest

from llmserve.builder.source import fetch_file
from llmserve.errors import ModelSourceError


def test_a_connection_that_breaks_off_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    httpx = pytest.importorskip("httpx")

    def broken(*_: object, **__: object) -> None:
        raise httpx.RemoteProtocolError("Server disconnected")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(ModelSourceError, match=r"acme/tiny could not be downloaded: Server dis"):
        fetch_file("acme/tiny", "model.onnx", revision="", report=lambda _: None)
