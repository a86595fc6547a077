from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from llmserve.testing import LiveTriton

from .process import Gateway, supervising


@pytest.fixture(scope="package")
def gateway(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway as `serve` starts it, which says that the models are well."""
    socket = tmp_path_factory.mktemp("serve") / "socket"
    with supervising(triton, socket):
        process = Gateway(triton, "--supervisor", str(socket), "--inspect")
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="package")
def model(triton: LiveTriton) -> str:
    return triton.build("hf")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium or Chrome; a machine without them skips these tests, and ``.ci/run`` ends."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        command = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(command).exists():
            pytest.skip("the page is tested in Chromium: run .venv/bin/playwright install chromium")
        chromium = playwright.chromium.launch(executable_path=command, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, gateway: Gateway, model: str) -> Iterator[Page]:
    """The page on a small screen, with a storage of its own, and nothing may go wrong in it."""
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: _note_violation(line.text, errors))
    page.on("request", lambda request: _refuse_others(request.url, gateway, errors))
    page.goto(gateway.root)
    for name in ("#chat-model", "#left-model", "#right-model", "#model"):
        page.wait_for_selector(f"{name} option[value={model}]", state="attached")
        # Those of the views that are not open as well.
        page.locator(name).evaluate(
            "(list, model) => { list.value = model; list.dispatchEvent(new Event('change')) }",
            model,
        )
    yield page
    page.close()
    assert not errors


def _note_violation(line: str, errors: list[str]) -> None:
    """Note what the browser itself finds wrong with the page; scripts' own lines are others."""
    if "Content Security Policy" in line or line.startswith("[DOM]"):
        errors.append(line)


def _refuse_others(url: str, gateway: Gateway, errors: list[str]) -> None:
    if not url.startswith((gateway.root, "data:", f"blob:{gateway.root}")):
        errors.append(url)
