"""Something to examine that has no server behind it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from llmserve_certify.endpoint import Ask, Decision, Hostile, Refusal, Reply


class Scripted:
    """Answers as a function says, of a prompt and of how often it was asked before."""

    kind, model, url = "script", "script", "here"
    task = "generate"
    chats = False
    streams = False
    takes: frozenset[str] | None = None

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        self._answer, self._asked = answer, Counter[str]()
        self._lock = threading.Lock()

    def ask(self, ask: Ask) -> Reply:
        with self._lock:
            self._asked[ask.prompt] += 1
            return Reply(self._answer(ask.prompt, self._asked[ask.prompt]))

    def pieces(self, ask: Ask) -> Generator[str, None, None]:
        yield self.ask(ask).text

    def hostile(self) -> Sequence[Hostile]:
        return ()

    def send(self, hostile: Hostile) -> Reply | None:
        return None

    def curl(self, ask: Ask) -> str:
        return "curl"

    def hostile_curl(self, hostile: Hostile) -> str:
        return "curl"

    def values(self, texts: Sequence[str]) -> list[Any]:
        raise NotImplementedError

    def values_curl(self, texts: Sequence[str]) -> str:
        return "curl"

    def decide(self, state: str, questions: Mapping[str, Any]) -> dict[str, Decision]:
        raise Refusal(404, "there is no such path")

    def decide_curl(self, state: str, questions: Mapping[str, Any]) -> str:
        return "curl"

    def describe(self) -> dict[str, str]:
        return {}
