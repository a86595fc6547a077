"""The views of the gateway's page for requests, comparisons and the load, in a browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

JAPAN = "The capital of Japan is Tokyo."


@pytest.fixture
def page(page: Page) -> Page:
    page.locator("#tab-ask").click()
    return page


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
    type_key = "field => { field.value = 'secret'; field.dispatchEvent(new Event('input')) }"
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
    assert page.locator("#answers .text").all_inner_texts() == [JAPAN] * 6
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
    expect(page.locator("#ask")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "tab-load"
    page.keyboard.press("ArrowRight")
    expect(page.locator("#chat")).to_be_visible()
    # The view is in the address, so that it can be linked to, and a reload shows it again.
    page.keyboard.press("End")
    page.reload()
    expect(page.locator("#load")).to_be_visible()


def test_two_answers_to_one_prompt_stand_side_by_side(page: Page) -> None:
    page.set_viewport_size({"width": 1100, "height": 800})
    page.locator("#tab-compare").click()
    page.locator("#right-temperature").fill("0.5")
    page.locator("#compare-tokens").fill("12")
    requests: list[dict[str, object]] = []
    page.on("request", lambda request: requests.append(request.post_data_json or {}))
    page.get_by_role("button", name="Send to both").click()
    expect(page.locator(".columns .running")).to_have_count(0)
    left, right = page.locator(".columns > li").all()
    assert JAPAN.startswith(left.locator(".answer").inner_text()[:20])
    assert [request.get("temperature") for request in requests] == [None, 0.5]
    assert (
        left.locator(".who").inner_text() + " · temperature 0.5"
        == right.locator(".who").inner_text()
    )
    boxes = left.bounding_box(), right.bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    left.get_by_role("button", name="Go on in the chat").click()
    expect(page.locator("#chat .turn")).to_have_count(2)
    expect(page.locator("#chat")).to_be_visible()


def test_models_on_demand_have_buttons(page: Page) -> None:
    model = {"id": "m", "loaded": False, "state": "unloaded", "size": 88_000_000, "pinned": False}

    def load(route: Route) -> None:
        assert route.request.post_data_json == {"model": "m"}
        model.update(loaded=True, state="ready")
        route.fulfill(json=model)

    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    page.route("**/models/load", load)
    refusal = {"error": {"message": "this key may not unload models"}}
    page.route("**/models/unload", lambda route: route.fulfill(status=403, json=refusal))
    expect(page.locator("#on-demand")).to_be_hidden()
    page.locator("#tab-load").click()
    rows = page.locator("#on-demand-models li")
    expect(rows).to_have_text(["munloadedLoad"])
    page.get_by_role("button", name="Load m", exact=True).click()
    expect(rows).to_have_text(["mready · 88 MBUnload"])
    page.get_by_role("button", name="Unload m", exact=True).click()
    expect(page.locator("#notice-text")).to_have_text("this key may not unload models")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_what_keys_have_used_is_a_table(page: Page) -> None:
    used = {"requests": 1234, "prompt_tokens": 5_000_000, "answer_tokens": 7}
    evil = "<img src=x onerror=alert(1)> " + "long" * 50
    names = [("2026-11-28", "a"), ("2026-11-28", "b"), ("2026-11-29", evil)]
    rows = [{"day": day, "name": name, **used} for day, name in names]
    page.locator("#tab-load").click()
    expect(page.locator("#gauges dt").first).to_be_visible()
    # The gateway has no keys.
    expect(page.locator("#usage")).to_be_hidden()
    page.route("**/usage", lambda route: route.fulfill(json={"usage": rows}))
    page.locator("#tab-chat").click()
    page.locator("#tab-load").click()
    numbers = "1,2345,000,0007"
    shown = [f"{day}{name}{numbers}" for day, name in (names[2], names[0], names[1])]
    expect(page.locator("#usage-rows tr")).to_have_text(shown)
    assert page.locator("#usage img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 360
