"""Take the pictures of the gateway's page: ``python -m tests.readme.page``.

They are of real conversations in Chromium, with the real chat model of the tests and with the demo
model that sees, served here; with ``seen`` only the latter.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from llmserve.testing import LiveTriton
from plugins.tools.bench.gateway import gateway
from tests.real.model import real_model
from tests.support import ROOT

PICTURE = ROOT / "docs" / "plugins" / "page.png"
SEEN = ROOT / "docs" / "guides" / "seen.png"
DRAWING = ROOT / "docs" / "guides" / "drawing.png"
MODEL = "smollm2-135m"
CHATS = (
    ["Why is the sky blue? Answer in one sentence."],
    ["What is the capital of Japan?", "Give me three short tips for learning Python, as a list."],
)
SIZE: ViewportSize = {"width": 1200, "height": 800}
PATIENCE = 120_000


def main() -> None:
    if "seen" not in sys.argv[1:]:
        options = {"name": MODEL, "dtype": "float32", "cache_tokens": 8192}
        with page_of(str(real_model()), **options) as page:
            for chat in CHATS:
                page.locator("#new-conversation").click()
                talk(page, chat)
            page.mouse.move(0, 0)
            page.screenshot(path=PICTURE)
    with page_of("demo-vision", name="demo-vision") as page:
        page.locator("#choose-image").set_input_files(DRAWING)
        page.wait_for_selector("#images img")
        talk(page, ["What do you see?", "Which colour is it?", "How many shapes are there?"])
        page.mouse.move(0, 0)
        page.screenshot(path=SEEN)


@contextmanager
def page_of(source: str, **options: Any) -> Iterator[Page]:
    with tempfile.TemporaryDirectory() as folder, LiveTriton.start(Path(folder)) as triton:
        triton.build("iterative", source, **options)
        with gateway(triton.server.grpc_url) as (address, _), sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport=SIZE, color_scheme="dark")
            page.goto(address.removesuffix("/v1"))
            page.wait_for_selector("#chat-model option", state="attached")
            yield page
            browser.close()


def talk(page: Page, chat: list[str]) -> None:
    page.locator("#chat-settings").evaluate("settings => { settings.open = false }")
    for number, prompt in enumerate(chat, 1):
        page.locator("#message").fill(prompt)
        page.locator("#message").press("Enter")
        answers = page.locator("#turns .assistant")
        expect(answers).to_have_count(number)
        expect(page.locator("#turns .running")).to_have_count(0, timeout=PATIENCE)


if __name__ == "__main__":
    main()
