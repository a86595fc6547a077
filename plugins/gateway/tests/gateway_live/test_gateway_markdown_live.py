"""The page's reader of Markdown, in a browser; it needs no server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page, Route

from llmserve_gateway.app import PAGE, PAGE_HEADERS

ROOT = "http://page.test"
RENDER = """async texts => {
  const { MarkdownView } = await import("/render.js");
  return texts.map(text => {
    const view = new MarkdownView();
    view.show(text);
    return view.element.innerHTML;
  });
}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Page]:
    """An empty page that may import the page's modules."""

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(f"{ROOT}/")
        kind = "text/javascript" if name else "text/html"
        body = (PAGE / name).read_bytes() if name else b"<!doctype html>"
        route.fulfill(body=body, headers={**PAGE_HEADERS, "content-type": kind})

    page = browser.new_page()
    page.route("**", answer)
    page.goto(f"{ROOT}/")
    yield page
    page.close()


CASES = json.loads(Path(__file__).with_name("markdown.json").read_text("utf-8"))


def test_markdown_is_shown(page: Page) -> None:
    drawn = page.evaluate(RENDER, [case["text"] for case in CASES])
    assert drawn == [case["html"] for case in CASES]


MARKS = st.sampled_from([
    "*", "**", "_", "~~", "`", "```", "[", "](", ")", "![", "<", ">", "|", "\\", " ", "\t", '"',
    "\n", "\n\n", "\n> ", "\n- ", "\n  - ", "\n1. ", "\n# ", "\n|-|-|\n", "\n---\n", "\n```\n",
    "http://a.b", "javascript:x", "<script>", "&lt;", "word", "é", "😀", "\u202e", "\0",
])  # fmt: skip
PROBLEMS = """async ([texts, names, attributes]) => {
  const { MarkdownView } = await import("/render.js");
  const problems = [];
  for (const text of texts) {
    const [grown, whole] = [new MarkdownView(), new MarkdownView()];
    grown.show(text.slice(0, text.length / 2));
    grown.show(text);
    whole.show(text);
    if (!grown.element.isEqualNode(whole.element)) problems.push([text, "grows otherwise"]);
    for (const element of whole.element.querySelectorAll("*")) {
      if (!names.includes(element.localName)) problems.push([text, element.localName]);
      for (const { name, value } of element.attributes) {
        if (!attributes.includes(name)) problems.push([text, name]);
        const linked = name !== "href" || /^(https?:|mailto:)/.test(value);
        if (!linked) problems.push([text, value]);
      }
    }
    if (!/[[<`]/.test(text) && /word/.test(text) && !/word/.test(whole.element.textContent)) {
      problems.push([text, "lost"]);
    }
  }
  return problems;
}"""
NAMES = [
    "p", "br", "code", "pre", "figure", "figcaption", "span", "button", "a", "blockquote", "hr",
    "ul", "ol", "li", "input", "strong", "em", "s", "div", "h4", "h5", "h6",
    "table", "thead", "tbody", "tr", "th", "td",
]  # fmt: skip
ATTRIBUTES = [
    "dir", "class", "tabindex", "role", "aria-label", "type", "href", "title", "target", "rel",
    "start", "disabled",
]  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(MARKS, max_size=60).map("".join), min_size=20, max_size=60))
def test_no_text_makes_other_elements_and_a_growing_one_ends_like_the_whole(
    page: Page, texts: list[str]
) -> None:
    assert page.evaluate(PROBLEMS, [texts, NAMES, ATTRIBUTES]) == []


def test_a_hostile_text_takes_no_more_time_than_its_length(page: Page) -> None:
    parts = [
        "*a ", "_a_ ", "[](", "[a](http://", "`a``", "http://)", "> ", "  - a\n", "**a* ", "***a",
        "|a|b|\n|-|-|\n", "a*b_c~~d[", "\n\n- x", "<http://", "*_", "a\n",
    ]  # fmt: skip
    texts = [part * (40_000 // len(part)) for part in parts]
    milliseconds = page.evaluate(
        """async texts => {
          const { MarkdownView } = await import("/render.js");
          return texts.map(text => {
            const start = performance.now();
            const view = new MarkdownView();
            document.body.append(view.element);
            view.show(text);
            view.element.getBoundingClientRect();
            view.element.remove();
            return performance.now() - start;
          });
        }""",
        [*texts, "**a " * 8_000 + "b** " * 8_000],
    )
    # A step for each pair of characters would take minutes.
    assert max(milliseconds) < 5000
