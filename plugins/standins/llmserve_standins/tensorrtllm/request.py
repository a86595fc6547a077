"""A request under way in the stand-in: its prompts as sequences of ids, and its responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmserve.runtime import Generation, Params, RequestError, Responder, Sampler, tensors_of
from llmserve.runtime.constrained import Compiler
from llmserve_standins.tensorrtllm.settings import Settings

_SCORES = {"cum_log_probs", "output_log_probs", "context_logits", "generation_logits"}
# What may be there as long as it asks for nothing.
_MUST_BE = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "return_log_probs": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
    "return_kv_cache_reuse_stats": False,
}
_KNOWN = frozenset({
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list",
    "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
    "streaming", "stop", "exclude_input_in_output", "return_num_input_tokens",
    "return_num_output_tokens", "len_penalty", "decoder_input_ids", "guided_decoding_guide_type",
    "guided_decoding_guide", *_MUST_BE,
})  # fmt: skip
_NO_END = 2**32 - 1
_FIRST_CHARACTER = 0x10000


class IdTokenizer:
    """Writes each id as a character: the backend knows no text, and the runtime reads words."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        del special
        return [ord(character) - _FIRST_CHARACTER for character in text.strip()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(_FIRST_CHARACTER + token) for token in ids)


_IDS: Any = IdTokenizer()


class TokenSequence(Generation):
    """One sequence. As TensorRT-LLM does, it keeps the id that ends it, and sends stop words."""

    cache: Any = None
    """The model's keys and values of what it has read."""
    sampler: Sampler

    def take_ids(self) -> list[int]:
        """Return the tokens that came since the last time, but for the one that ends an answer."""
        return list(_IDS.encode(self.take()))


class PendingRequest(Responder):
    """Sends what its sequences make: pieces as they come, or everything at the end."""

    def __init__(self, raw: Any, settings: Settings, pb: Any) -> None:
        parts: Any = SimpleNamespace(pb_utils=pb)
        super().__init__(raw, parts)
        self.id: str = raw.request_id()
        self.given = tensors_of(raw)
        self.begun = False
        self.rows: list[TokenSequence] = []
        self._settings, self._pb = settings, pb
        self._outputs = frozenset(raw.requested_output_names()) or settings.outputs.keys()
        self.streams = self.flag("streaming")
        # A stream has new tokens only.
        self._echo = not self.streams and not self.flag(
            "exclude_input_in_output", settings.excludes_input
        )

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.given[name].any()) if name in self.given else default

    def read(self, context_length: int | None, compiler: Compiler | None = None) -> None:
        """Make a sequence of each row, or say what the stand-in cannot do."""
        for name, tensor in self.given.items():
            if name not in _KNOWN and tensor.size:
                raise RequestError(f"the stand-in for TensorRT-LLM has no {name}")
            if name in _MUST_BE and (tensor != _MUST_BE[name]).any():
                allowed = str(_MUST_BE[name]).lower()
                raise RequestError(f"the stand-in for TensorRT-LLM takes no {name} but {allowed}")
        rows = range(len(self.given["input_ids"]))
        self.rows = [self._sequence(row, context_length, compiler) for row in rows]

    def _one(self, row: int, name: str, default: Any = None) -> Any:
        return self.given[name].reshape(-1).item(row) if name in self.given else default

    def _words(self, row: int, name: str) -> tuple[str, ...]:
        """Read one row of words: all ids, and below them where each word ends."""
        if name not in self.given:
            return ()
        ids, below = self.given[name][row]
        ends = [int(end) for end in below if end > 0]
        return tuple(_IDS.decode(ids[a:b]) for a, b in zip([0, *ends], ends, strict=False))

    def _sequence(
        self, row: int, context_length: int | None, compiler: Compiler | None
    ) -> TokenSequence:
        one = partial(self._one, row)
        ids = self.given["input_ids"][row, : one("input_lengths")].tolist()
        length = one("request_output_len")
        if length < 1 or (context_length is not None and len(ids) + length > context_length):
            raise RequestError(
                f"request_output_len {length} and the prompt's {len(ids)} tokens are over the "
                f"engine's {context_length}"
            )
        top_k, top_p = one("runtime_top_k", 0), one("runtime_top_p", 0.0)
        params = Params(
            # With neither of them TensorRT-LLM takes the likeliest token.
            temperature=0.0 if top_k == 1 or not (top_k or top_p) else one("temperature", 1.0),
            top_k=top_k,
            top_p=top_p or 1.0,
            repetition_penalty=one("repetition_penalty", 1.0),
            presence_penalty=one("presence_penalty", 0.0),
            frequency_penalty=one("frequency_penalty", 0.0),
            min_tokens=one("min_tokens", one("min_length", 0)),
            seed=one("seed", one("random_seed", 0)),
            stop_words=self._words(row, "stop_words_list"),
            include_stop_str_in_output=True,
            bad_words=self._words(row, "bad_words_list"),
        )
        end = one("end_id", _NO_END)
        sequence = TokenSequence(
            ids, params, max_tokens=length,
            eos_ids=frozenset() if end < 0 or end == _NO_END else frozenset({end}),
            decode=_IDS.decode, is_cancelled=self.cancelled,
        )  # fmt: skip
        sequence.sampler = Sampler(sequence, _IDS)
        kind, guide = (one(f"guided_decoding_{n}", b"").decode() for n in ("guide_type", "guide"))
        if kind == "json":
            kind, guide = "json_schema", '{"type":"object"}'
        # As the real backend, it says nothing of a type that it does not know.
        if compiler and kind in ("json_schema", "regex", "ebnf_grammar"):
            sequence.constraint = compiler.constraint(sequence, (kind, guide))
        return sequence

    def send_new(self) -> None:
        """Send the new tokens, if any are to be sent now; without sequences, that it is over."""
        done = all(row.done for row in self.rows)
        pieces = [row.take_ids() for row in self.rows] if done or self.streams else []
        if not done and not any(pieces):
            return
        if self._echo:
            pieces = [[*r.prompt_ids, *ids] for r, ids in zip(self.rows, pieces, strict=True)]
        tensors = self._tensors(pieces) if pieces else []
        self._send(self._pb.InferenceResponse(output_tensors=tensors), done)

    def _tensors(self, pieces: Sequence[Sequence[int]]) -> list[Any]:
        rows, settings = self.rows, self._settings
        width = max(map(len, pieces))
        if settings.is_first:
            # The oldest answers are as long as they could have become.
            width = max(len(row.prompt_ids) + row.max_tokens for row in rows)
        ids = np.zeros((len(rows), 1, width), np.int32)
        for index, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            ids[index] = min(row.eos_ids, default=0)
            ids[index, 0, : len(piece)] = piece
        lengths = np.array([[len(piece)] for piece in pieces], np.int32)
        known: dict[str, Any] = {"output_ids": ids, "sequence_length": lengths}
        if len(rows) > 1 or settings.fills_in_scores:
            known["batch_index"] = np.arange(len(rows), dtype=np.int32)[:, None]
        if self.flag("return_num_input_tokens"):
            known["num_input_tokens"] = np.array([[len(row.prompt_ids)] for row in rows], np.int32)
        if self.flag("return_num_output_tokens"):
            known["num_output_tokens"] = lengths
        if settings.fills_in_scores:
            for name in settings.outputs.keys() & _SCORES:
                sizes = (max(size, 1) for size in settings.outputs[name])
                known[name] = np.zeros((len(rows), *sizes), np.float32)
        wanted = (name for name in settings.outputs if name in self._outputs and name in known)
        return [self._pb.Tensor(name, known[name]) for name in wanted]
