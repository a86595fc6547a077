"""The pages in a real browser, as wide as a telephone and as a desk, by day and by night."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmserve_bench.report import write_report

from .examples import make_case, make_comparison, make_result, make_sweep

LONG = "a-model-of-a-name-without-any-place-to-break-it-" * 3
RESULTS = {
    "bench": make_result("bench", [make_case("iterative", name=LONG, failing=2, limit=1.5)]),
    "compare": make_comparison((2, 16), names=("static", LONG)),
    "sweep": make_sweep(),
}
OUTSIDE = """
[...document.querySelectorAll("svg")].flatMap((plot) => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll("text")].filter((text) => {
    const own = text.getBoundingClientRect();
    return own.left < box.left - 2 || own.right > box.right + 2
      || own.top < box.top - 2 || own.bottom > box.bottom + 2;
  }).map((text) => text.textContent);
})
"""
FAINT = """
[...document.querySelectorAll("h1, h2, td, th, dd, figcaption, p, svg text")].filter((node) => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((p) => (p <= 0.03928 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let ground = node;
  const clear = "rgba(0, 0, 0, 0)";
  while (getComputedStyle(ground).backgroundColor === clear) ground = ground.parentElement;
  const style = getComputedStyle(node);
  const [low, high] = [light(node.closest("svg") ? style.fill : style.color),
    light(getComputedStyle(ground).backgroundColor)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05) < 4.5;
}).map((node) => node.textContent.slice(0, 40))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None or find_spec("playwright") is None:
        # Where everything is tested, a missing browser must not look like a test that passed.
        assert not os.environ.get("CI"), "CI tests pages in Chromium, with playwright"
        pytest.skip("there is no Chromium on PATH, or no playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("kind", RESULTS)
def test_the_page_looks_right(
    browser: Any, kind: str, width: int, scheme: str, tmp_path: Path
) -> None:
    path, *_ = write_report(RESULTS[kind], tmp_path)
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked: list[str] = []
    told: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: told.append(message.text))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(FAINT) == []
    plots = page.evaluate("[...document.querySelectorAll('svg')].map((p) => p.clientHeight)")
    assert len(plots) >= 4
    assert min(plots) > 60
    # It stands alone: nothing is loaded, and the browser has nothing to complain of.
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert told == []
    page.close()


def test_plots_beside_markdown_can_be_opened_by_themselves(browser: Any, tmp_path: Path) -> None:
    plots = [path for path in write_report(RESULTS["bench"], tmp_path) if path.suffix == ".svg"]
    page = browser.new_page()
    for plot in plots:
        page.goto(plot.as_uri())
        assert page.evaluate("document.documentElement.tagName") == "svg"
        assert (
            page.evaluate(OUTSIDE.replace("document.querySelectorAll('svg')", "[document]")) == []
        )
