"""The web page of the gateway, in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from .process import Gateway


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
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: _note_violation(line.text, errors))
    page.on("request", lambda request: _refuse_others(request.url, gateway, errors))
    page.goto(gateway.root)
    page.wait_for_selector(f"#model option[value={model}]", state="attached")
    page.locator("#model").select_option(model)
    yield page
    page.close()
    assert not errors


def _note_violation(line: str, errors: list[str]) -> None:
    if "Content Security Policy" in line:
        errors.append(line)


def _refuse_others(url: str, gateway: Gateway, errors: list[str]) -> None:
    if not url.startswith((gateway.root, "data:")):
        errors.append(url)


def test_an_answer_comes_token_by_token_with_its_figures(page: Page) -> None:
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text("ended by stop").wait_for()
    card = page.locator("#answers li").inner_text()
    assert "The capital of Japan is Tokyo." in card
    assert "first token" in card
    assert "13 tokens" in card
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_request_is_shown_as_code(page: Page) -> None:
    page.locator("#prompt").fill("it's")
    page.locator("#code summary").click()
    assert "/v1/chat/completions" in page.locator("#as-curl").inner_text()
    python = page.locator("#as-python").inner_text()
    assert '"content":"it\'s"' in python
    type_key = "field => { field.value = 'secret'; field.form.dispatchEvent(new Event('input')) }"
    page.locator("#key").evaluate(type_key)
    curl = page.locator("#as-curl").inner_text()
    assert "Authorization: Bearer $OPENAI_API_KEY" in curl
    assert "secret" not in curl + page.locator("#as-python").inner_text()
    compile(python, "as-python", "exec")


def test_a_refusal_is_shown_next_to_its_request(page: Page) -> None:
    page.locator("#tokens").fill("100000")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("alert").wait_for()
    assert "maximum context length" in page.locator("#answers li").inner_text()


def test_several_requests_run_concurrently(page: Page) -> None:
    page.locator("#many").click()
    # wait_for_function() evaluates text, which the page's content security policy forbids.
    expect(page.locator("#answers li")).to_have_count(6, timeout=30_000)
    expect(page.locator("#answers li.running")).to_have_count(0, timeout=30_000)
    assert (
        page.locator("#answers .text").all_inner_texts() == ["The capital of Japan is Tokyo."] * 6
    )
    assert page.locator("#now-tokens").inner_text() == str(6 * 13)


def test_a_request_can_be_stopped(page: Page) -> None:
    # Otherwise the answer would be complete in a fifth of a second, before the button is measured.
    slow = {"ignore_eos": True, "logprobs": 5, "repetition_penalty": 1.01}
    page.route(
        "**/v1/completions",
        lambda route: route.continue_(post_data={**route.request.post_data_json, **slow}),
    )
    page.locator("#kind").select_option("completion")
    page.locator("#prompt").fill("Once upon a time")
    page.locator("#tokens").fill("480")
    page.get_by_role("button", name="Send", exact=True).click()
    stop = page.get_by_role("button", name="Stop", exact=True)
    place = stop.bounding_box()
    # The button must not move while the text and the figures below it grow.
    page.locator(".figures", has_text="tokens/s").wait_for()
    assert stop.bounding_box() == place
    stop.click()
    page.get_by_text("· stopped").wait_for()


def test_the_keyboard_switches_views(page: Page) -> None:
    page.locator("#tab-ask").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("Tokens/s", exact=True).wait_for()
    assert page.locator("#ask").is_hidden()
    assert page.evaluate("document.activeElement.id") == "tab-load"
