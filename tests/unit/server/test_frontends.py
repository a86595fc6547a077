"""Frontends: which of them `serve` starts, with which command, and their addresses."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import PluginError
from llmserve.plugin import Address, Frontend, Place
from llmserve.plugins.registry import Plugin, Registry
from llmserve.server.run.frontend import start_frontend
from llmserve.server.settings import free_port
from llmserve.testing import FrontendConformance
from llmserve_cli.frontends import RequestedFrontends
from tests.unit.plugins.test_plugins import module

PLACE = Place((Address("127.0.0.1:1"),), "127.0.0.1", 0, 1.0)
LISTENS = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        server.accept()[0].close()
"""


def frontend(name: str = "acme", command: Any = lambda place: ["-c", ""], **more: Any) -> Frontend:
    return Frontend(name=name, summary="", command=command, port=0, **more)


def requested(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    hook = module(
        llmserve_register_frontends=lambda: [frontend("plain"), frontend("usual", default=True)]
    )
    registry = Registry([Plugin("acme", "acme", "1.0", module=hook)])
    monkeypatch.setattr(Registry, "load", lambda: registry)
    frontends = RequestedFrontends(names, None, PLACE)
    frontends.choose_places({})
    return [chosen.name for chosen, _ in frontends.places]


def test_only_defaults_are_started_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested(monkeypatch) == ["usual"]
    assert requested(monkeypatch, "plain") == ["plain"]
    assert requested(monkeypatch, "none") == []


@pytest.mark.parametrize("returned", ["-m acme_frontend", [1, 2], None, {"-m": "acme"}])
def test_a_command_that_is_no_list_of_arguments_is_refused(returned: Any) -> None:
    with pytest.raises(PluginError, match="command of frontend 'acme' returned"):
        frontend(command=lambda place: returned).arguments(PLACE)
    arguments = frontend(command=lambda place: ("-m", Path("x"))).arguments(PLACE)
    assert arguments == ["-m", "x"]


def test_the_address_has_the_frontends_scheme(tmp_path: Path) -> None:
    place = Place(
        (Address("127.0.0.1:1"),), "127.0.0.1", free_port("127.0.0.1", 0, "frontend"), 1.0
    )
    ours = frontend(command=lambda place: ["-c", LISTENS, str(place.port)], scheme="tcp")
    running = start_frontend(ours, place, tmp_path / "log")
    try:
        assert running.url == f"tcp://127.0.0.1:{place.port}"
    finally:
        running.stop(0.0)


class Suite(FrontendConformance):
    def __init__(self, host: str) -> None:
        self._host = host

    def _registered(self) -> Frontend:
        code = LISTENS.replace('"127.0.0.1"', f'"{self._host}"')
        return frontend(command=lambda place: ["-c", code, str(place.port)])


@pytest.mark.parametrize(("host", "passes"), [("127.0.0.1", True), ("", False)])
def test_the_suite_finds_a_frontend_that_listens_everywhere(
    host: str, passes: bool, tmp_path: Path
) -> None:
    suite = Suite(host)
    running = start_frontend(suite._registered(), suite.place(), tmp_path / "log")
    try:
        if passes:
            suite.test_it_listens_at_its_place_and_nowhere_else([running])
        else:
            with pytest.raises(AssertionError):
                suite.test_it_listens_at_its_place_and_nowhere_else([running])
    finally:
        running.stop(0.0)


def test_the_suite_starts_a_frontend_elsewhere_if_someone_takes_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = Suite("127.0.0.1")
    free = suite.place()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        places = [replace(free, port=other.getsockname()[1]), free]
        monkeypatch.setattr(suite, "place", lambda: places.pop(0))
        running = suite._started(tmp_path / "log")
    try:
        assert running.place == free
    finally:
        running.stop(0.0)


def test_the_suite_finds_a_frontend_that_ends_with_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="say it in one line"):
        Suite("127.0.0.1").test_it_says_why_it_cannot_listen(tmp_path)
