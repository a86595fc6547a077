"""What `certify` finds of a model that reads images, and keeps what it has read of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.testing import LiveTriton, run

pytestmark = pytest.mark.long


def test_a_model_that_sees_passes_what_is_checked_of_images(
    triton: LiveTriton, tmp_path: Path
) -> None:
    from llmserve.testing.tiny_seeing import save_seeing

    model = triton.build("iterative", str(save_seeing("llava", tmp_path / "seeing")))
    names = ("images-are-seen", "order-of-images", "own-images", "bad-images")
    words = [word for name in names for word in ("--only", name)]
    asked = ("--url", triton.server.grpc_url, "--precision", "float32", "--json", "-")
    done = run("certify", model, *words, *asked)
    verdicts = json.loads(done.stdout)["verdicts"]
    found = {verdict["name"]: (verdict["state"], verdict["words"]) for verdict in verdicts}
    assert found == dict.fromkeys(names, ("passed", ""))
    assert done.returncode == 0, done.stderr
