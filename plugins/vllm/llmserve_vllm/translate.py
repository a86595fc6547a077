"""A request in vLLM's words, and its answer in ours."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.runtime import (
    FormConstraint,
    Generation,
    Logprob,
    Params,
    RequestError,
    Tokenizer,
    form_of,
)
from llmserve_vllm import library, workarounds

# What vLLM takes of an option with a wider range here (0.32.0).
_RANGES = {"temperature": (0, 2), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
# What llguidance reads in a schema about itself. By default it allows any whitespace, and small
# models tend to write it forever; a pattern for it is repeated by the versions that vLLM takes.
_JSON_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def sampling_params(
    generation: Generation, tokenizer: Tokenizer, *, vocabulary: int, answered: int = 0
) -> Any:
    """Return what vLLM is asked for; ``answered`` tokens of the answer are part of the prompt.

    Stop words are searched for by the generation, so that streams are the same as everywhere.
    """
    params = generation.params
    _check_ranges(params)
    stops = () if params.ignore_eos else generation.eos_ids
    length = generation.max_tokens - answered
    # Its scores have padding after the last token that is one.
    scored = [token for token in generation.scored if token < vocabulary]
    if scored and not hasattr(library.SamplingParams, "logprob_token_ids"):
        raise RequestError(
            "this version of vLLM tells no log-probabilities of given tokens",
            code="unsupported_option",
            param="logprobs_of",
        )
    found = library.SamplingParams(
        **_sampling(params),
        max_tokens=length,
        min_tokens=min(max(0, params.min_tokens - answered), length),
        # Which tokens end the answer is ours to say, also instead of the model's own.
        ignore_eos=True,
        stop_token_ids=sorted(token for token in stops if token < vocabulary),
        logit_bias={t: b for t, b in params.logit_bias.items() if t < vocabulary} or None,
        # Of named tokens, vLLM takes no other count than theirs.
        logprobs=None if scored else params.logprobs_count,
        prompt_logprobs=params.prompt_logprobs if not answered else None,
        structured_outputs=_form(params),
        detokenize=False,
        output_kind=library.RequestOutputKind.DELTA,
        skip_clone=True,
        **({"logprob_token_ids": scored} if scored else {}),
    )
    if params.bad_words:
        ids = _ids_of(params.bad_words, tokenizer)
        # A word with a token that the model has no score for cannot come.
        workarounds.forbid(found, [word for word in ids if max(word) < vocabulary])
    return found


def check_constraint(generation: Generation) -> None:
    """Wait until a constraint is known to be enforceable; refuse one that vLLM cannot enforce."""
    generation.settle()
    if generation.constraint is not None and not isinstance(generation.constraint, FormConstraint):
        raise RequestError(
            "vLLM chooses the tokens itself: it takes no budget of thinking, no form that begins "
            "after the thinking, and no constraint of a plugin's own formatter",
            code="unsupported_option",
        )


def is_repeatable(params: Params) -> bool:
    """Whether an answer that begins again has the same tokens, and has to begin again.

    What a form allows next depends on the answer from its beginning, and so does a seed's draw.
    """
    return params.seed is not None or form_of(params) is not None


def logprobs_of(
    chosen: Mapping[int, Any], token: int, count: int, named: Sequence[int] = ()
) -> Logprob:
    """Return a token's log-probability, as vLLM has it, and those of the ``count`` likeliest or of
    the ``named``."""
    if named:
        scores = ((one, chosen[one].logprob if one in chosen else -math.inf) for one in named)
        return Logprob(token, chosen[token].logprob, tuple(Logprob(*each) for each in scores))
    likeliest = sorted(chosen.items(), key=lambda item: (-item[1].logprob, item[0]))[:count]
    top = tuple(Logprob(other, found.logprob) for other, found in likeliest)
    return Logprob(token, chosen[token].logprob, top)


def first_line(error: Exception) -> str:
    """Return what an error of vLLM says to a user."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def _check_ranges(params: Params) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name) or 0
        if not low <= value <= high:
            raise RequestError(
                f"{name} must be from {low} to {high} with vLLM, not {value:g}",
                code="invalid_value",
                param=name,
            )


def _sampling(params: Params) -> dict[str, Any]:
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    found = {name: getattr(params, name) for name in penalties}
    if params.greedy:
        return {**found, "temperature": 0.0}
    seed = params.seed
    if seed is None and form_of(params):
        # An answer that has to begin again begins in the same way.
        seed = secrets.randbits(63)
    return {
        **found,
        "temperature": params.effective_temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        # To vLLM, -1 is no seed, which is what the largest of 64 bits could become.
        "seed": None if seed is None else seed % (1 << 63),
    }


def _form(params: Params) -> Any:
    form = form_of(params)
    if form is None:
        return None
    kind, text = form
    if kind == "json_schema":
        text = json.dumps({**json.loads(text), "x-guidance": _JSON_SPACES})
        return library.StructuredOutputsParams(json=text)
    if kind == "regex":
        return library.StructuredOutputsParams(regex=text)
    return library.StructuredOutputsParams(grammar=text)


def _ids_of(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    # A word has different tokens at the beginning of a text and after a space.
    forms = [form for word in words for form in (word, f" {word}")]
    return [ids for form in forms if (ids := tokenizer.encode(form, special=False))]
