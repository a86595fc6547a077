"""The code of the guides on models that keep sequences, run as it stands there."""

from __future__ import annotations

import subprocess

import pytest

from llmserve.testing import LiveTriton
from llmserve.testing.one_layer import one_layer
from tests.site.blocks import blocks
from tests.support import ROOT

pytestmark = pytest.mark.long


@pytest.mark.parametrize("page", ["docs/plugins/gpt2.md", "docs/guides/tutorials.md"])
def test_what_the_guides_show_works(
    page: str,
    triton: LiveTriton,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The same as in the plugin's own tests.
    small = one_layer(tmp_path_factory.getbasetemp() / "one-layer")
    model = triton.build("gpt2-onnx", str(small))
    ran = 0
    for block in blocks((ROOT / page).read_text(encoding="utf-8"), page):
        if block.why_not:
            continue
        if block.language == "python":
            code = block.text.replace("127.0.0.1:8001", triton.server.grpc_url)
            for name in ("demo", "gpt2"):
                code = code.replace(f'"{name}"', f'"{model}"')
            exec(compile(code, str(block), "exec", dont_inherit=True), {})
            assert len(capsys.readouterr().out.splitlines()) == 2
            ran += 1
        for command in block.commands():
            if command.startswith("curl "):
                command = command.replace("localhost:8000", triton.server.http_url)
                asked = command.replace("models/demo", f"models/{model}")
                done = subprocess.run(["bash", "-c", asked], capture_output=True, check=True)
                assert b'"text_output"' in done.stdout, done.stdout
    assert ran == 1
