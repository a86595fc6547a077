"""What comes from the first stage: a prompt with its wishes, or the wish for more tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve.runtime.protocols import Parts
from llmserve.runtime.request import Prompt, room_for
from llmserve.runtime.sampling import Sampler
from llmserve.runtime.stage import Tensors
from llmserve_gpt2.session.sequences import Sequence

_WORDS = ("stop_words", "bad_words")


@dataclass(frozen=True)
class Wishes:
    """One request as the first stage has read it; ``step`` is how many tokens it asks for."""

    prompt: str
    ids: tuple[int, ...]
    params: Params
    step: int | None

    def write(self) -> str:
        """Return all but the ids as JSON."""
        asked = {name: value for name, value in asdict(self.params).items() if name != "extra"}
        return json.dumps({"prompt": self.prompt, "params": asked, "step": self.step})

    @classmethod
    def read(cls, tensors: Tensors) -> Wishes:
        """Read what :meth:`write` wrote, with the ids that came beside it."""
        said: Mapping[str, Any] = json.loads(tensors["wishes"].reshape(-1)[0])
        asked = dict(said["params"])
        for name in _WORDS:
            asked[name] = tuple(asked[name])
        ids = tuple(int(token) for token in tensors["prompt_ids"].reshape(-1) if token >= 0)
        return cls(said["prompt"], ids, Params(**asked), said["step"])

    def refuse_as_step(self, begun: Params) -> None:
        """Refuse what belongs to the start of a sequence: nobody would heed it later."""
        if self.prompt or self.ids:
            raise RequestError("the prompt is sent once, with sequence_start; leave it out later")
        plain, now, then = asdict(Params()), asdict(self.params), asdict(begun)
        for name, value in now.items():
            if value not in (plain[name], then[name]):
                raise RequestError(f"{name} is said with sequence_start, and holds to the end")


def opened(wishes: Wishes, parts: Parts, number: int, now: float) -> Sequence:
    """Begin a sequence, or refuse what cannot be answered."""
    if not wishes.ids:
        raise RequestError("text_input is empty: send at least one character")
    prompt = Prompt(wishes.prompt, list(wishes.ids), wishes.params)
    room = room_for(prompt, parts.generator.context_length, parts.defaults["max_tokens"])
    params = wishes.params
    if params.min_tokens > room:
        raise RequestError(f"min_tokens {params.min_tokens} is over max_tokens {room}: lower it")
    eos = parts.generator.eos_ids | parts.tokenizer.eos_ids
    if params.end_id is not None and params.end_id >= 0:
        eos = frozenset({params.end_id})
    generation = Generation(
        prompt.ids,
        params,
        max_tokens=room,
        eos_ids=eos,
        decode=parts.tokenizer.decode,
        prompt=prompt.text,
    )
    exclude = params.exclude_input_in_output
    echo = bool(parts.defaults.get("echo")) if exclude is None else not exclude
    return Sequence(generation, Sampler(generation, parts.tokenizer), number, now, echo=echo)
