"""A pending request of the stand-in: its prompts as sequences of ids, and its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmserve.runtime import (
    Compiler,
    FormConstraint,
    Generation,
    Params,
    RequestError,
    Responder,
    Sampler,
    tensors_of,
)
from llmserve_standins.tensorrtllm.settings import Settings

_SCORES = {"cum_log_probs", "output_log_probs", "context_logits", "generation_logits"}
# Inputs that are accepted only with these values, which request no extra work.
_ALLOWED = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "return_log_probs": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
    "return_kv_cache_reuse_stats": False,
}
_SUPPORTED = frozenset({
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list",
    "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
    "streaming", "stop", "exclude_input_in_output", "return_num_input_tokens",
    "return_num_output_tokens", "len_penalty", "decoder_input_ids", "guided_decoding_guide_type",
    "guided_decoding_guide", *_ALLOWED,
})  # fmt: skip
_EXCLUSIVE_IN_0_5 = frozenset({"presence_penalty", "repetition_penalty"})
_NO_END = 2**32 - 1
_FIRST_CHARACTER = 0x10000


class IdTokenizer:
    """Maps each id to a character: the backend has no text, but the runtime compares words."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        del special
        return [ord(character) - _FIRST_CHARACTER for character in text.strip()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(_FIRST_CHARACTER + token) for token in ids)


_IDS: Any = IdTokenizer()


def _says(tensor: Any) -> bool:
    """Whether a tensor says anything: texts that are all empty, such as of no adapter, do not."""
    return bool(tensor.size) and (tensor.dtype != object or any(tensor.reshape(-1)))


@dataclass
class TokenSequence:
    """One sequence. Like TensorRT-LLM, it withholds the id that ends it, and sends stop words."""

    generation: Generation
    sampler: Sampler
    cache: Any = None
    """The model's keys and values of the tokens so far."""

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.generation.prompt_ids)

    @property
    def done(self) -> bool:
        return self.generation.done

    def take_ids(self) -> list[int]:
        """Return the tokens since the last call, except for the one that ends an answer."""
        return list(_IDS.encode(self.generation.take()))


class PendingRequest:
    """Sends the tokens of its sequences: pieces as they are generated, or all at the end."""

    def __init__(self, raw: Any, settings: Settings, pb: Any) -> None:
        # What a failure is described with.
        parts: Any = SimpleNamespace(pb_utils=pb, tokenizer=_IDS, generator=None, formatter=None)
        self.responder = Responder(raw, parts)
        self.id: str = raw.request_id()
        self.inputs = tensors_of(raw)
        self.started = False
        self.rows: list[TokenSequence] = []
        self._settings = settings
        self._outputs = frozenset(raw.requested_output_names()) or settings.outputs.keys()
        self.streams = self.flag("streaming")
        # A stream has only new tokens.
        self._echo = not self.streams and not self.flag(
            "exclude_input_in_output", settings.excludes_input
        )

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.inputs[name].any()) if name in self.inputs else default

    def read(self, context_length: int | None, compiler: Compiler | None = None) -> None:
        """Create a sequence for each row; refuse inputs that the stand-in does not support."""
        for name, tensor in self.inputs.items():
            if name not in _SUPPORTED and _says(tensor):
                problem = f"the stand-in for TensorRT-LLM does not support {name}"
                raise RequestError(problem, code="unsupported_option", param=name)
            if name in _ALLOWED and (tensor != _ALLOWED[name]).any():
                allowed = str(_ALLOWED[name]).lower()
                problem = f"the stand-in for TensorRT-LLM supports only {name} {allowed}"
                raise RequestError(problem, code="unsupported_option", param=name)
        if self._settings.is_0_5 and self.inputs.keys() >= _EXCLUSIVE_IN_0_5:
            names = " and ".join(sorted(_EXCLUSIVE_IN_0_5))
            problem = f"Found ambiguous parameters {names} which are mutually exclusive."
            raise RequestError(problem, code="conflicting_options")
        rows = range(len(self.inputs["input_ids"]))
        self.rows = [self._sequence(row, context_length, compiler) for row in rows]

    def _value(self, row: int, name: str, default: Any = None) -> Any:
        return self.inputs[name].reshape(-1).item(row) if name in self.inputs else default

    def _words(self, row: int, name: str) -> tuple[str, ...]:
        """Read one row of words: all ids, and below them the ends of the words."""
        if name not in self.inputs:
            return ()
        ids, below = self.inputs[name][row]
        ends = [int(end) for end in below if end > 0]
        return tuple(_IDS.decode(ids[a:b]) for a, b in zip([0, *ends], ends, strict=False))

    def _sequence(
        self, row: int, context_length: int | None, compiler: Compiler | None
    ) -> TokenSequence:
        value = partial(self._value, row)
        ids = self.inputs["input_ids"][row, : value("input_lengths")].tolist()
        length = value("request_output_len")
        if length < 1 or (context_length is not None and len(ids) + length > context_length):
            raise RequestError(
                f"request_output_len {length} and the prompt's {len(ids)} tokens do not fit the "
                f"engine's context of {context_length}",
                code="context_length_exceeded",
                param="max_tokens",
                **({"context": context_length} if context_length else {}),
                prompt_tokens=len(ids),
                max_tokens=length,
            )
        top_k, top_p = value("runtime_top_k", 0), value("runtime_top_p", 0.0)
        params = Params(
            # With neither of them TensorRT-LLM chooses the likeliest token.
            temperature=0.0 if top_k == 1 or not (top_k or top_p) else value("temperature", 1.0),
            top_k=top_k,
            top_p=top_p or 1.0,
            repetition_penalty=value("repetition_penalty", 1.0),
            presence_penalty=value("presence_penalty", 0.0),
            frequency_penalty=value("frequency_penalty", 0.0),
            min_tokens=value("min_tokens", value("min_length", 0)),
            seed=value("seed", value("random_seed", 0)),
            stop_words=self._words(row, "stop_words_list"),
            include_stop_str_in_output=True,
            bad_words=self._words(row, "bad_words_list"),
        )
        end = value("end_id", _NO_END)
        generation = Generation(
            ids, params, max_tokens=length,
            eos_ids=frozenset() if end < 0 or end == _NO_END else frozenset({end}),
            decode=_IDS.decode, is_cancelled=self.responder.cancelled,
        )  # fmt: skip
        names = ("guided_decoding_guide_type", "guided_decoding_guide")
        kind, guide = (value(name, b"").decode() for name in names)
        if kind == "json":
            kind, guide = "json_schema", '{"type":"object"}'
        # Like the real backend, it ignores an unknown type.
        if compiler and kind in ("json_schema", "regex", "ebnf_grammar"):
            generation.constraint = FormConstraint(generation, compiler.start((kind, guide)))
            generation.settle()
        return TokenSequence(generation, Sampler(generation, _IDS))

    def send_new(self) -> None:
        """Send the new tokens, if any are due; without sequences, send an empty final response."""
        done = all(row.done for row in self.rows)
        pieces = [row.take_ids() for row in self.rows] if done or self.streams else []
        if not done and not any(pieces):
            return
        if self._echo:
            pieces = [[*row.prompt_ids, *ids] for row, ids in zip(self.rows, pieces, strict=True)]
        tensors = self._tensors(pieces) if pieces else {}
        self.responder.send_tensors(tensors, final=done)

    def _tensors(self, pieces: Sequence[Sequence[int]]) -> dict[str, Any]:
        rows, settings = self.rows, self._settings
        width = max(map(len, pieces))
        if settings.is_0_5 and not self.streams:
            # 0.5.0 pads whole answers to their maximum length.
            width = max(len(row.prompt_ids) + row.generation.max_tokens for row in rows)
        ids = np.zeros((len(rows), 1, width), np.int32)
        for index, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            ids[index] = min(row.generation.eos_ids, default=0)
            ids[index, 0, : len(piece)] = piece
        lengths = np.array([[len(piece)] for piece in pieces], np.int32)
        values: dict[str, Any] = {"output_ids": ids, "sequence_length": lengths}
        if len(rows) > 1 or settings.fills_in_scores:
            values["batch_index"] = np.arange(len(rows), dtype=np.int32)[:, None]
        if self.flag("return_num_input_tokens"):
            values["num_input_tokens"] = np.array([[len(row.prompt_ids)] for row in rows], np.int32)
        if self.flag("return_num_output_tokens"):
            values["num_output_tokens"] = lengths
        if settings.fills_in_scores:
            for name in settings.outputs.keys() & _SCORES:
                sizes = (max(size, 1) for size in settings.outputs[name])
                values[name] = np.zeros((len(rows), *sizes), np.float32)
        names = (name for name in settings.outputs if name in self._outputs and name in values)
        return {name: values[name] for name in names}
