"""The prompts of a request as sequences of ids, for the backend knows no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from llmserve.runtime.constrained import Compiler
from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import STOP, Generation
from llmserve.runtime.params import Params
from llmserve.runtime.sampling import Sampler

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
KNOWN = frozenset({
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list",
    "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
    "streaming", "stop", "exclude_input_in_output", "return_num_input_tokens",
    "return_num_output_tokens", "len_penalty", "decoder_input_ids", "guided_decoding_guide_type",
    "guided_decoding_guide", *_MUST_BE,
})  # fmt: skip
_NO_END = 2**32 - 1


class IdTokenizer:
    """Gives a sampler the ids of bad words, which are written as numbers here."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids that a word was written as; its second form, after a space, has none."""
        del special
        return [] if text.startswith(" ") else [int(number) for number in text.split()]


class TokenSequence(Generation):
    """One sequence; it ends at the engine's stop words too, which are ids.

    As TensorRT-LLM does, it keeps the id that ends an answer to itself, and sends stop words.
    """

    def __init__(
        self, prompt_ids: Sequence[int], params: Params, stop_ids: Sequence[Sequence[int]], *,
        max_tokens: int, end_id: int | None, is_cancelled: Callable[[], bool],
    ) -> None:  # fmt: skip
        ends = frozenset() if end_id is None else frozenset({end_id})
        super().__init__(
            prompt_ids, params, max_tokens=max_tokens, eos_ids=ends, decode=lambda _: "",
            is_cancelled=is_cancelled,
        )  # fmt: skip
        self.cache: Any = None
        """The model's keys and values of what it has read."""
        tokenizer: Any = IdTokenizer()
        self.sampler = Sampler(self, tokenizer)
        self._stops = [list(ids) for ids in stop_ids if ids]
        self._sent = 0

    def push(self, token_id: int, logits: Any = None) -> None:
        super().push(token_id, logits)
        if self.done or len(self.token_ids) < self.params.min_tokens:
            return
        if any(self.token_ids[-len(ids) :] == ids for ids in self._stops):
            self._finish(STOP)

    def take_ids(self) -> list[int]:
        """Return the tokens that came since the last time, but for the one that ends an answer."""
        ended = self.finish_reason == STOP and self.token_ids[-1] in self.eos_ids
        answer = self.token_ids[:-1] if ended else self.token_ids
        new = answer[self._sent :]
        self._sent = len(answer)
        return new


class Guides:
    """Holds sequences to their guides, with llguidance in xgrammar's place."""

    def __init__(self, tokenizer_info: Mapping[str, Any]) -> None:
        tokenizer: Any = SimpleNamespace(tokenizer_json=lambda: tokenizer_info["tokenizer_str"])
        self._compiler = Compiler(tokenizer, frozenset(tokenizer_info["stop_token_ids"]))

    def hold(self, sequence: TokenSequence, kind: str, guide: str) -> None:
        """As the real backend, it says nothing of a type that it does not know."""
        if kind == "json":
            kind, guide = "json_schema", '{"type":"object"}'
        if kind in ("json_schema", "regex", "ebnf_grammar"):
            sequence.constraint = self._compiler.constraint(sequence, (kind, guide))


def read_sequences(
    given: Mapping[str, Any],
    context_length: int | None,
    is_cancelled: Callable[[], bool],
    guides: Guides | None = None,
) -> list[TokenSequence]:
    """Return a sequence for each row of a request, or say what the stand-in cannot do."""
    for name, tensor in given.items():
        if name not in KNOWN and tensor.size:
            raise RequestError(f"the stand-in for TensorRT-LLM has no {name}")
        allowed = _MUST_BE.get(name)
        if allowed is not None and (tensor != allowed).any():
            raise RequestError(
                f"the stand-in for TensorRT-LLM takes no {name} but {str(allowed).lower()}"
            )
    rows = range(given["input_ids"].shape[0])
    sequences = [_sequence(given, row, context_length, is_cancelled) for row in rows]
    if guides is not None and "guided_decoding_guide_type" in given:
        names = ("guided_decoding_guide_type", "guided_decoding_guide")
        texts = ([one.decode() for one in given[name].reshape(-1)] for name in names)
        for sequence, kind, guide in zip(sequences, *texts, strict=True):
            guides.hold(sequence, kind, guide)
    return sequences


def _sequence(
    given: Mapping[str, Any], row: int, context_length: int | None, is_cancelled: Callable[[], bool]
) -> TokenSequence:
    def one(name: str, default: Any = None) -> Any:
        return given[name].reshape(-1)[row].item() if name in given else default

    def words(name: str) -> list[list[int]]:
        """Read one row of words: all ids, and below them where each word ends."""
        if name not in given:
            return []
        ids, ends = given[name][row][0], [int(end) for end in given[name][row][1] if end > 0]
        return [ids[a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]

    ids = given["input_ids"][row, : one("input_lengths")].tolist()
    length = one("request_output_len")
    if length < 1 or (context_length is not None and len(ids) + length > context_length):
        raise RequestError(
            f"request_output_len {length} and the prompt's {len(ids)} tokens are over the engine's "
            f"{context_length}"
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
        bad_words=tuple(" ".join(map(str, word)) for word in words("bad_words_list")),
    )
    end = one("end_id", -1)
    return TokenSequence(
        ids, params, words("stop_words_list"), max_tokens=length,
        end_id=None if end < 0 or end == _NO_END else end, is_cancelled=is_cancelled,
    )  # fmt: skip
