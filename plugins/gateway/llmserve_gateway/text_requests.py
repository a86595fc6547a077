"""Requests for texts, as all APIs of the gateway that have them are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llmserve.client import Tools
from llmserve.runtime.contract import ADAPTER, EXTRA_FILES, GENERATE, IMAGE_URL, SUFFIX
from llmserve_gateway.image_hosts import is_address
from llmserve_gateway.stored_responses import ResponseState

MAX_ANSWERS = 128
BYTES_PER_TOKEN = 3
"""A token is seldom shorter."""
HELD_BYTES_PER_TOKEN = 256
"""What is no prompt takes memory and no time: 256 MB is as much as a million tokens."""
FETCHED_BYTES = 5 << 20
"""How much may come from the address of an image."""
IMAGE_TOKENS = 1000
"""What an image counts as, unless its model says what it makes of one: hundreds to thousands."""


@dataclass(frozen=True)
class Thinking:
    """What a request asks of a model's thinking; None where it leaves that to the model."""

    enabled: bool | None = None
    effort: str | None = None
    required_by: str = ""
    """The field that only makes sense if the model thinks before it answers."""
    budget: int | None = None
    """After how many tokens the thinking should end, if that can be had."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for a chat template that say so, as families name them."""
        enabled = False if self.effort == "none" else self.enabled
        switch = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
        effort = {"reasoning_effort": self.effort} if self.effort not in (None, "none") else {}
        return {**switch, **effort}


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request in terms of the tensor contract; ``unknown`` are unsupported fields.

    ``options`` are those of the tensor contract. A prompt is a text, or token ids.
    ``echo_only`` requests return nothing but their prompt; ``report_stop_word`` requests return
    the stop word that ended the answer; ``echoed_fields`` are for the response alone. ``sent``
    maps names of the contract to the fields that the client used, where those vary.
    """

    model: str
    options: dict[str, Any]
    prompts: list[str] | list[list[int]] = field(default_factory=lambda: [""])
    answers_per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    logprobs: bool = False
    report_stop_word: bool = False
    tools: Tools | None = None
    thinking: Thinking = Thinking()
    has_parts: bool = False
    """Whether an answer may have more than text: it is known only when the model is."""
    echoed_fields: Mapping[str, Any] = field(default_factory=dict)
    asked: str = ""
    """What the client calls the model, if not by its name."""
    sent: Mapping[str, str] = field(default_factory=dict)
    session: str = ""
    """Names the requests that had better be answered by the same replica, and of which what is
    computed is kept longer."""
    is_marked: bool = False
    """Whether what is computed of it is kept longer, as that of a session."""
    unknown: frozenset[str] = frozenset()
    priority: int | None = None
    """The class that it asks for, None for that of its key."""
    state: ResponseState | None = None
    """What it says of responses that are kept, in the API that has them."""
    only_loads: bool = False
    """Whether it asks for nothing but that its model is loaded."""
    keep: float | None = None
    """For how many seconds its model stays loaded after it, below 0 without end, if it says so."""
    image_tokens: int = IMAGE_TOKENS
    """How many tokens its model makes of an image; it is known only when the model is."""
    fingerprint: str = ""
    """Names what the model's answers depend on; it is known only when the model is."""

    begins_alike = False
    """Whether its prompts differ only at their ends."""
    tasks = (GENERATE,)
    """What models are for that can answer it."""
    cuts = False

    @property
    def unloads(self) -> bool:
        """Whether it asks for nothing but that its model is unloaded."""
        return self.only_loads and self.keep == 0

    @property
    def adapter(self) -> str:
        """The name of the adapter that is to answer, "" for the model itself."""
        return str(self.options.get(ADAPTER.name, ""))

    @property
    def images(self) -> Sequence[str]:
        """The addresses of the images that it shows; most have the image inside."""
        return self.options.get(IMAGE_URL.name) or ()

    @property
    def called(self) -> str:
        """What the client calls the model, and the answer as well."""
        return self.asked or self.model

    @property
    def answer_count(self) -> int:
        return len(self.prompts) * self.answers_per_prompt

    @property
    def parallel_calls(self) -> bool:
        """Whether an answer may contain several tool calls."""
        return self.tools is None or self.tools.parallel

    @cached_property
    def estimated_tokens(self) -> int:
        """A rough count of the prompt tokens; the model counts them exactly."""
        images = len(self.prompts) * len(self.images) * self.image_tokens * BYTES_PER_TOKEN
        size = self._prompt_bytes + images
        return size * self.answers_per_prompt // BYTES_PER_TOKEN + 1

    @property
    def held_tokens(self) -> int:
        """What it counts as while it waits: images and schemas are in memory as well."""
        return self.estimated_tokens + self._other_bytes // HELD_BYTES_PER_TOKEN

    @property
    def sent_bytes(self) -> int:
        """About how much is sent to the model: its prompt and all options for each answer."""
        others = len(self.prompts) * self._other_bytes
        return self.answers_per_prompt * (self._prompt_bytes + others)

    @cached_property
    def _prompt_bytes(self) -> int:
        if messages := self.options.get("messages"):
            content = [messages, self.options.get("chat_template_kwargs")]
            return len(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
        beside = (self.options.get(name) or "" for name in (SUFFIX, EXTRA_FILES))
        size = sum(len(text.encode(errors="replace")) for text in beside) * len(self.prompts)
        return size + sum(
            len(prompt.encode(errors="replace"))
            if isinstance(prompt, str)
            else len(prompt) * BYTES_PER_TOKEN
            for prompt in self.prompts
        )

    @property
    def _other_bytes(self) -> int:
        values = self.options.values()
        texts = [each for value in values for each in (value if type(value) is list else [value])]
        addresses = sum(map(is_address, self.images))
        # An image is in base64 when it has come.
        come = addresses * FETCHED_BYTES * 4 // 3
        return come + sum(sys.getsizeof(text) for text in texts if isinstance(text, str))

    def model_calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Return a prompt and options for each answer."""
        calls: list[tuple[str, dict[str, Any]]] = []
        for prompt in self.prompts:
            for choice in range(self.answers_per_prompt):
                options = dict(self.options)
                if choice and "seed" in options:
                    # The same seed would give the same answer.
                    options["seed"] = (options["seed"] + choice) % 2**63
                if isinstance(prompt, str):
                    calls.append((prompt, options))
                else:
                    if self.echo:
                        # Only the model knows the text of these tokens.
                        options["exclude_input_in_output"] = False
                    calls.append(("", {**options, "input_ids": prompt}))
        return calls
