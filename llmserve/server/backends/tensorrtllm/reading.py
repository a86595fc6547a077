"""From the backend's tensors to sequences, or a line that says what the stand-in cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.params import Params
from llmserve.server.backends.tensorrtllm.tokens import Tokens, written

KNOWN = frozenset({
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list",
    "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
    "streaming", "stop", "exclude_input_in_output", "return_num_input_tokens",
    "return_num_output_tokens", "embedding_bias", "len_penalty", "beam_width",
    "return_log_probs", "return_context_logits", "return_generation_logits",
    "return_perf_metrics", "num_return_sequences",
})  # fmt: skip
"""The tensors that are read."""
# What may be there as long as it asks for nothing.
_MUST_BE = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "return_log_probs": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
}
_NO_END = 2**32 - 1


def read_rows(
    given: Mapping[str, Any], context_length: int | None, is_cancelled: Callable[[], bool]
) -> list[Tokens]:
    """Return a sequence for each row of a request."""
    for name, tensor in given.items():
        if (name not in KNOWN or name == "embedding_bias") and tensor.size:
            raise RequestError(f"the stand-in for TensorRT-LLM has no {name}")
        allowed = _MUST_BE.get(name)
        if allowed is not None and (tensor != allowed).any():
            raise RequestError(
                f"the stand-in for TensorRT-LLM takes no {name} but {str(allowed).lower()}"
            )
    rows = given["input_ids"].shape[0]
    return [_row(given, row, context_length, is_cancelled) for row in range(rows)]


def _row(
    given: Mapping[str, Any], row: int, context_length: int | None, is_cancelled: Callable[[], bool]
) -> Tokens:
    def one(name: str, default: Any = None) -> Any:
        return given[name].reshape(-1)[row].item() if name in given else default

    def words(name: str) -> list[list[int]]:
        return _words(given[name][row]) if name in given else []

    ids = given["input_ids"][row, : one("input_lengths")].tolist()
    wanted = one("request_output_len")
    if wanted < 1 or (context_length is not None and len(ids) + wanted > context_length):
        raise RequestError(
            f"request_output_len {wanted} and the prompt's {len(ids)} tokens are over the engine's "
            f"{context_length}"
        )
    end = one("end_id")
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
        bad_words=tuple(written(ids) for ids in words("bad_words_list")),
    )
    return Tokens(
        ids,
        params,
        words("stop_words_list"),
        max_tokens=wanted,
        end_id=None if end is None or end < 0 or end == _NO_END else end,
        is_cancelled=is_cancelled,
    )


def _words(tensor: Any) -> list[list[int]]:
    """Read one row of words: all ids, and below them where each word ends."""
    ends = [int(end) for end in tensor[1] if end > 0]
    return [tensor[0, a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]
