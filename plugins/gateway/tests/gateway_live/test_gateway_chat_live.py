"""Conversations on the gateway's page, in a browser."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

JAPAN = "What is the capital of Japan?"
TOKYO = "The capital of Japan is Tokyo."
STORED = (
    "Object.keys(localStorage).filter(name => name.startsWith('llmserve/conversation/')).length"
)

Requests = list[dict[str, Any]]


@pytest.fixture
def requests(page: Page) -> Requests:
    """The bodies of the requests for answers."""
    bodies: Requests = []

    def note(request: Request) -> None:
        if request.method == "POST":
            bodies.append(request.post_data_json or {})

    page.on("request", note)
    return bodies


def say(page: Page, text: str) -> None:
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")


def finished(page: Page, answers: int) -> None:
    expect(page.locator("#turns .assistant")).to_have_count(answers)
    expect(page.locator("#turns .running")).to_have_count(0)


def ask(page: Page, text: str = JAPAN) -> None:
    answers = page.locator("#turns .assistant").count()
    say(page, text)
    finished(page, answers + 1)


def answers_with(page: Page, *deltas: dict[str, str], end: str = "data: [DONE]\n\n") -> None:
    """Let the server's answers consist of these pieces."""
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]} if end else None
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, finish] if chunk)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=events + end),
    )


def answers_slowly(page: Page) -> None:
    """Let answers take long enough to be stopped."""
    slow = {"ignore_eos": True, "logprobs": True, "top_logprobs": 5, "max_tokens": 400}

    def go_on(route: Route) -> None:
        body = route.request.post_data_json or {}
        route.continue_(post_data={**body, **slow})

    page.route("**/v1/chat/completions", go_on)


def test_a_conversation_has_turns(page: Page, requests: Requests) -> None:
    page.locator("#chat-settings summary").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#chat-tokens").fill("40")
    ask(page)
    ask(page, "Where do foxes live?")
    texts = page.locator("#turns .answer").all_inner_texts()
    assert texts[0] == TOKYO
    assert "first token" in page.locator("#turns .figures").first.inner_text()
    assert texts[1] in page.locator("#spoken").inner_text()
    assert requests[1]["max_tokens"] == 40
    assert requests[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": JAPAN},
        {"role": "assistant", "content": TOKYO},
        {"role": "user", "content": "Where do foxes live?"},
    ]
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(
    page: Page, requests: Requests
) -> None:
    answers_slowly(page)
    say(page, "Tell me a long story")
    page.locator("#turns .figures", has_text="tokens/s").wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("· stopped").wait_for()
    said = page.locator("#turns .answer").inner_text()
    page.unroute("**/v1/chat/completions")
    ask(page)
    assert requests[-1]["messages"][1]["content"].startswith(said[:20])


def test_an_edited_turn_drops_what_follows_until_that_is_undone(
    page: Page, requests: Requests
) -> None:
    ask(page, "Hello")
    ask(page, "And then?")
    page.locator("#turns .user").first.get_by_role("button", name="Edit").click()
    field = page.get_by_role("textbox", name="Edit this turn")
    page.get_by_text("What follows is dropped").wait_for()
    field.fill(JAPAN)
    field.press("Enter")
    finished(page, 1)
    assert requests[-1]["messages"] == [{"role": "user", "content": JAPAN}]
    assert page.locator("#turns .answer").inner_text() == TOKYO
    page.get_by_role("button", name="Undo").click()
    finished(page, 2)
    assert page.locator("#turns .said").all_inner_texts() == ["Hello", "And then?"]


def test_an_answer_is_asked_for_again_or_corrected_by_hand(page: Page, requests: Requests) -> None:
    ask(page)
    page.get_by_role("button", name="Regenerate").click()
    finished(page, 1)
    expect(page.locator("#turns .answer")).to_have_text(TOKYO)
    assert requests[1] == requests[0]
    page.locator("#turns .assistant").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit this turn").fill("It is **Kyoto**.")
    page.get_by_role("button", name="Save").click()
    assert page.locator("#turns .answer strong").inner_text() == "Kyoto"
    ask(page, "Are you sure?")
    assert requests[-1]["messages"][1]["content"] == "It is **Kyoto**."


def test_a_reload_keeps_the_conversations_of_this_browser(page: Page) -> None:
    ask(page)
    page.locator("#list-toggle").click()
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Where do foxes live?")
    page.evaluate("localStorage.setItem('llmserve/conversation/broken', '{\"turns\": 1')")
    page.reload()
    assert page.locator("#turns .said").all_inner_texts() == ["Where do foxes live?"]
    page.locator("#list-toggle").click()
    titles = page.locator("#conversation-list .open")
    assert titles.all_inner_texts() == ["Where do foxes live?", JAPAN]
    titles.last.click()
    assert page.locator("#turns .answer").inner_text() == TOKYO
    page.locator("#list-toggle").click()
    page.get_by_role("button", name=f"Delete {JAPAN}").click()
    assert page.locator("#turns .turn").count() == 0
    assert page.evaluate(STORED) == 2  # One of them is the broken one.
    page.get_by_role("button", name="Undo").click()
    assert page.locator("#turns .answer").inner_text() == TOKYO
    assert page.evaluate(STORED) == 3


def test_the_page_is_as_large_as_its_window(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollHeight") == 740
    page.set_viewport_size({"width": 1200, "height": 800})
    for _ in range(2):
        page.get_by_role("button", name="New conversation").click()
        ask(page)
    assert page.evaluate("document.documentElement.scrollHeight") == 800
    box = page.get_by_role("button", name="Delete all").bounding_box()
    assert box is not None
    assert box["height"] < 60


def test_a_conversation_is_exported(page: Page) -> None:
    ask(page)
    files: dict[str, str] = {}
    for kind in ("Markdown", "JSON"):
        page.locator("#export summary").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=kind).click()
        files[download.value.suggested_filename] = Path(download.value.path()).read_text("utf-8")
    text, messages = files.values()
    assert list(files) == [f"what-is-the-capital-of-japan.{end}" for end in ("md", "json")]
    assert text == f"**user**\n\n{JAPAN}\n\n**assistant**\n\n{TOKYO}\n"
    assert [message["content"] for message in json.loads(messages)] == [JAPAN, TOKYO]


HOSTILE = """
<script>hit()</script> <img src=x onerror="hit()"> <svg onload="hit()"></svg>
<style>*{display:none}</style> <iframe src="javascript:hit()"></iframe>
<a href="javascript:hit()">html</a> <div style="position:fixed">x</div>

[js](javascript:hit()) [spaced]( JaVaScRiPt:hit()) [tab](java\tscript:hit())
[data](data:text/html,<script>hit()</script>) [vb](vbscript:hit) [file](file:///etc/passwd)
[blob](blob:x) [relative](/metrics) [quote](http://x.example/"onclick="hit()")
![picture](http://tracker.example/seen.png) ![js](javascript:hit()) <javascript:hit()>

| <b onclick=hit()>a</b> | `x` |
|:-|-|
| "><script>hit()</script> | [t](javascript:hit()) |

```"><script>hit()</script>
</code></pre><script>hit()</script>
```
"""


def test_nothing_in_a_text_takes_effect(page: Page) -> None:
    page.evaluate("window.hits = 0; window.hit = () => { window.hits += 1 }")
    answers_with(page, {"content": HOSTILE}, {"content": "\n> end"})
    ask(page, HOSTILE)
    elements = page.evaluate(
        """[...document.querySelectorAll(".markdown *")].map(element =>
            [element.localName, ...[...element.attributes].map(({ name }) => name)].join(" "))"""
    )
    assert set(elements) <= {
        "p dir", "br", "code", "pre tabindex", "figure class", "figcaption", "span",
        "button type", "a href title target rel", "blockquote", "thead", "tbody", "tr",
        "table", "th dir", "td dir", "th dir class", "td dir class",
        "div class tabindex role aria-label",
    }  # fmt: skip
    links = page.locator(".markdown a").evaluate_all("links => links.map(link => link.href)")
    assert links == ["http://x.example/%22onclick=%22hit()%22", "http://tracker.example/seen.png"]
    assert page.locator(".markdown img, .markdown script, .said *").count() == 0
    assert "<script>hit()</script>" in page.locator(".answer").inner_text()
    page.reload()  # It is stored now.
    page.locator(".markdown blockquote").wait_for()
    assert page.evaluate("window.hits ?? 0") == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_an_answer_that_breaks_off_says_so(page: Page, requests: Requests) -> None:
    answers_with(page, {"content": "The capital"}, end="")
    ask(page)
    assert "broke off" in page.locator("#turns .error").inner_text()
    assert page.locator("#turns .answer").inner_text() == "The capital"
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#turns .answer")).to_have_text(TOKYO)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#turns .answer")).to_have_text("The capital")


def test_what_could_not_be_saved_stays_when_another_tab_makes_room(page: Page) -> None:
    ask(page)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    ask(page, "And then?")
    page.evaluate("window.dispatchEvent(new StorageEvent('storage', {key: null}))")
    assert page.locator("#turns .said").all_inner_texts() == [JAPAN, "And then?"]


def test_thoughts_are_folded_away_from_the_answer(page: Page, requests: Requests) -> None:
    answers_with(page, {"reasoning_content": "They ask"}, {"reasoning_content": " for a city."},
                 {"content": "Tokyo"})  # fmt: skip
    ask(page)
    thoughts = page.locator("#turns .thinking")
    expect(thoughts.locator(".markdown")).to_be_hidden()
    thoughts.locator("summary").click()
    assert thoughts.locator(".markdown").inner_text() == "They ask for a city."
    ask(page)
    assert [message["content"] for message in requests[1]["messages"]] == [JAPAN, "Tokyo", JAPAN]


def test_the_keyboard_alone_has_a_conversation(page: Page) -> None:
    def tab_to(found: Callable[[str], bool]) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            name = page.evaluate(
                "(document.activeElement.ariaLabel || document.activeElement.id || document.activeElement.textContent).trim()"  # noqa: E501
            )
            if found(name):
                return
        raise AssertionError("not reached")

    page.locator("#tab-chat").focus()
    tab_to(lambda name: name == "message")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    finished(page, 1)
    assert page.locator("#turns .said").inner_text() == "Hello\nagain"
    page.locator("#tab-chat").focus()
    tab_to(lambda name: name == "Edit")
    page.keyboard.press("Enter")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type(JAPAN)
    page.keyboard.press("Enter")
    finished(page, 1)
    assert page.evaluate("document.activeElement.id") == "message"
    page.locator("#tab-chat").focus()
    tab_to(lambda name: name == "Regenerate")
    page.keyboard.press("Enter")
    finished(page, 1)
    assert page.locator("#turns .answer").inner_text() == TOKYO


def test_a_full_storage_is_told_once_and_ends_nothing(page: Page) -> None:
    page.evaluate(
        """() => {
          for (let size = 1 << 22; size > 16; size >>= 1) {
            try { for (;;) localStorage.setItem(`x${localStorage.length}`, "x".repeat(size)) } catch {}
          }
        }"""  # noqa: E501
    )
    ask(page)
    page.get_by_text("This browser keeps no more").wait_for()
    ask(page, "Where do foxes live?")


RED = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def file_of(name: str, kind: str = "image/png") -> Any:
    return {"name": name, "mimeType": kind, "buffer": base64.b64decode(RED)}


def let_see(page: Page) -> None:
    """Have the server say that its models read images."""

    def answer(route: Route) -> None:
        response = route.fetch()
        models = [{**model, "images": True} for model in response.json()["data"]]
        route.fulfill(response=response, json={"object": "list", "data": models})

    page.route("**/v1/models", answer)
    page.locator("#key").dispatch_event("change")
    expect(page.locator(".add-image")).to_be_visible()


def drop(page: Page) -> None:
    dropped = page.evaluate_handle(
        """content => {
          const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0));
          const dropped = new DataTransfer();
          dropped.items.add(new File([bytes], "red.png", { type: "image/png" }));
          return dropped;
        }""",
        RED,
    )
    page.locator("#chat").dispatch_event("drop", {"dataTransfer": dropped})


def test_a_model_of_text_has_no_button_for_images(page: Page, model: str) -> None:
    expect(page.locator(".add-image")).to_be_hidden()
    drop(page)
    expect(page.locator("#notice-text")).to_have_text(f"{model} reads only text.")
    expect(page.locator("#images")).to_be_hidden()


def test_an_image_is_shown_small_and_goes_with_the_next_message(
    page: Page, requests: Requests
) -> None:
    let_see(page)
    answers_with(page, {"content": "A red square."})
    page.locator("#choose-image").set_input_files([file_of("red.png"), file_of("other.png")])
    waiting = page.locator("#images img")
    expect(waiting).to_have_count(2)
    box = waiting.first.bounding_box()
    assert box is not None
    assert box["height"] <= 100
    page.get_by_role("button", name="Remove other.png").click()
    expect(waiting).to_have_count(1)
    page.locator("#choose-image").set_input_files(file_of("talk.pdf", "application/pdf"))
    expect(page.locator("#notice-text")).to_have_text("talk.pdf is no PNG, JPEG, WebP or GIF.")
    ask(page, "What is this?")
    url = f"data:image/png;base64,{RED}"
    part = {"type": "image_url", "image_url": {"url": url}}
    shown = {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}
    assert requests[-1]["messages"] == [shown]
    expect(page.locator("#images")).to_be_hidden()
    expect(page.locator("#turns .user img")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    # It is a part of the conversation, which the next message continues.
    ask(page, "Are you sure?")
    assert requests[-1]["messages"][0] == shown
    # A browser keeps too little for photos: only that there was one.
    assert RED not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    expect(page.locator("#turns .user").first).to_contain_text("1 image, not kept by this browser")


def test_an_image_is_dropped_onto_the_conversation(page: Page, requests: Requests) -> None:
    let_see(page)
    answers_with(page, {"content": "A red square."})
    drop(page)
    expect(page.locator("#images img")).to_have_count(1)
    # Without a text as well.
    page.locator("#send-message").click()
    finished(page, 1)
    (message,) = requests[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
