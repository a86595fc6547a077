"""How the tests ask a served model."""

from __future__ import annotations

import time

from llmserve.client import Client

_TOKENS = 4


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Questions:
    """Asks questions about one long text, and takes the time until the answer."""

    def __init__(self, client: Client, model: str, text: str) -> None:
        self._client, self._model, self._text = client, model, text
        self.tokens = 0
        """How many the last prompt had."""

    def __call__(self, question: str) -> tuple[str, float]:
        began = time.monotonic()
        answer = self._client.generate(
            self._model, messages=message(f"{self._text}\n\n{question}"), max_tokens=_TOKENS
        )
        self.tokens = answer.input_tokens or 0
        return answer.text, time.monotonic() - began
