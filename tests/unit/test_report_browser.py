"""The pages in a real browser, as wide as a telephone and as a desk, by day and by night."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.measure.results import Result
from llmserve.report import write
from tests.unit.headless import Browser, find_browser
from tests.unit.report_examples import make_comparison, make_run, make_sweep, with_tools

PATH = find_browser()
pytestmark = pytest.mark.skipif(PATH is None, reason="there is no Chromium on PATH")

LONG = "a-model-of-a-name-without-any-place-to-break-it-" * 3
RESULTS: dict[str, Result] = {
    "run": with_tools(make_run("iterative", requests=40, failing=2, name=LONG)),
    "comparison": make_comparison((2, 16), requests=30, names=("static", LONG)),
    "sweep": make_sweep(),
}
TOO_FAINT = """
(() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((p) => (p <= 0.03928 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((part) => part.nodeType === 3 && part.data.trim());
    if (!own || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const [low, high] = [light(node.closest("svg") ? style.fill : style.color),
      light(ground(node))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push(node.textContent.slice(0, 40));
  }
  return faint;
})()
"""
OUTSIDE = """
[...document.querySelectorAll("svg.plot")].filter((plot) => plot.getClientRects().length).flatMap(
  (plot) => {
    const box = plot.getBoundingClientRect();
    return [...plot.querySelectorAll("text")].filter((text) => {
      const own = text.getBoundingClientRect();
      return own.left < box.left - 1 || own.right > box.right + 1
        || own.top < box.top - 1 || own.bottom > box.bottom + 1;
    }).map((text) => text.textContent);
  })
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PATH
    with Browser(PATH, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module", params=RESULTS, ids=str)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    write(RESULTS[request.param], folder)
    return (folder / "report.html").as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_looks_right(browser: Browser, url: str, width: int, dark: bool) -> None:
    browser.open(url, width=width, dark=dark)
    for fold in ("", "document.querySelectorAll('details').forEach((one) => (one.open = true))"):
        browser.evaluate(fold)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(TOO_FAINT) == []
        assert browser.evaluate(OUTSIDE) == []
    plots = "[...document.querySelectorAll('svg.plot')].filter((p) => p.clientHeight > 40).length"
    assert browser.evaluate(plots) == browser.evaluate("document.querySelectorAll('figure').length")
    told = [
        event
        for event in browser.events
        if event["method"]
        in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert told == []
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [place for place in asked if not place.startswith("data:")] == [url]


def test_two_that_are_compared_stand_side_by_side_on_a_telephone(
    browser: Browser, tmp_path: Path
) -> None:
    write(make_comparison((16,), requests=30), tmp_path)
    browser.open((tmp_path / "report.html").as_uri(), width=390)
    beyond = """
    (() => { const box = document.querySelector(".scroll[aria-label^='Figures']");
             return box.scrollWidth - box.clientWidth; })()
    """
    assert browser.evaluate(beyond) <= 0


def test_plots_beside_markdown_can_be_opened_by_themselves(
    browser: Browser, tmp_path: Path
) -> None:
    write(RESULTS["run"], tmp_path)
    for dark, ground in ((False, "rgb(255, 255, 255)"), (True, "rgb(18, 21, 26)")):
        browser.open((tmp_path / "timeline.svg").as_uri(), width=1280, dark=dark)
        fill = "getComputedStyle(document.querySelector('rect.f-paper')).fill"
        assert browser.evaluate(fill) == ground
