"""How the tests ask a served model."""

from __future__ import annotations

import json
import time

from llmserve.client import Client

_PATIENCE = 400
"""Seconds for thousands of tokens, on an old processor beside other tests."""
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
            self._model, messages=message(f"{self._text}\n\n{question}"), max_tokens=_TOKENS,
            timeout=_PATIENCE,
        )  # fmt: skip
        self.tokens = answer.input_tokens or 0
        return answer.text, time.monotonic() - began


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
    },
    "required": ["city", "population", "continent"],
    "additionalProperties": False,
}


def check_city(client: Client, model: str) -> None:
    """Ask for JSON of a schema, and check that it is that and makes sense."""
    question = "Describe Tokyo as JSON, with city, population and continent."
    answer = client.generate(
        model, messages=message(question), json_schema=json.dumps(SCHEMA), max_tokens=80
    )
    city = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert (city["city"], city["continent"]) == ("Tokyo", "Asia")
    assert isinstance(city["population"], int)
