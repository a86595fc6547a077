"""The files of the page, without a browser."""

from __future__ import annotations

import hashlib
import re

import pytest

from llmserve_gateway.app import PAGE
from llmserve_gateway.gateway import Settings

from .gateways import NO_TRITON, ask

FILES = sorted(file.name for file in PAGE.iterdir() if file.is_file())
VENDORED = PAGE / "vendor" / "markdown-it.js"
SHA = "40ee4f75f35a4c8d24f1d7a902f4c56a26da8bd9eec5bb02ad4a672d6ba05525"
# What makes elements, code or styles of a text, or reaches another server.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|parseFromString|createContextualFragment"
    r"|document\.write|srcdoc|\beval\b|new Function|cssText|setTimeout\(\s*[\"'`]"
    r"|https?://(?!www\.w3\.org/2000/svg)[\w.]+\w|//cdn|@import|\burl\("
)


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_the_page_makes_elements_of_text_or_loads_from_elsewhere(name: str) -> None:
    assert UNSAFE.findall((PAGE / name).read_text(encoding="utf-8")) == []


def test_the_reader_of_markdown_is_the_released_one_and_makes_nothing_of_text() -> None:
    """It names addresses, and loads from none; who updates it writes its hash here."""
    content = VENDORED.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA
    found = UNSAFE.findall(content.decode())
    assert {name for name in found if "://" not in name} == set()
    licenses = VENDORED.with_name("LICENSES.txt").read_text(encoding="utf-8")
    for package in re.findall(r"//#region node_modules/([\w.-]+)/", content.decode()):
        assert f"== {package}" in licenses


def test_every_file_of_the_page_is_used() -> None:
    texts = "".join((PAGE / name).read_text(encoding="utf-8") for name in FILES)
    unused = [name for name in FILES if name != "index.html" and f'{name}"' not in texts]
    assert not unused


@pytest.mark.parametrize("path", ["/", "/main.js"])
def test_no_script_but_the_pages_own_runs_in_it(path: str) -> None:
    headers = ask(Settings(NO_TRITON), "GET", path).headers
    policy = headers["content-security-policy"]
    for directive in (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    ):  # fmt: skip
        assert directive in policy.split("; ")
    assert "unsafe" not in policy
    assert headers["cache-control"] == "no-cache"
