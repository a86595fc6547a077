"""The inspector of the page, in a browser and in front of a real Triton."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from .process import Gateway


def test_a_request_is_shown_with_what_the_model_has_read(
    page: Page, gateway: Gateway, model: str
) -> None:
    tab = page.locator("#tab-inspect")
    expect(tab).to_be_hidden()
    page.evaluate("location.hash = 'inspect'")
    expect(tab).to_be_visible()
    expect(page.locator("#inspect-empty")).to_be_visible()
    text = "<b id=made>What is the capital of Japan?</b>"
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    with page.expect_response("**/inspect"):
        pass
    assert gateway.post("/v1/chat/completions", {**body, "user": "me"}).status_code == 200
    card = page.locator("#inspected li", has_text="/v1/chat/completions").first
    card.locator("summary").click()
    expect(card).to_contain_text("What the model read", timeout=30_000)
    card = page.locator("#inspected li").first
    card.locator("details").evaluate("each => { each.open = true }")
    shown = card.inner_text()
    # With the template of the model around it, and as text alone.
    assert text in shown
    assert shown.count("capital of Japan") >= 2
    assert "user" in shown
    assert "first token" in shown
    assert page.locator("#made").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#tab-chat").click()
    expect(page.locator("#inspected li")).to_have_count(0)
