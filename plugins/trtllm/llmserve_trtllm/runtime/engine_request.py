"""Turns prompts into requests to the engine: its tensors, names and types, within its limits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import (
    ImageProcessor,
    Params,
    Parts,
    ProductShapes,
    Prompt,
    RequestError,
    SeenPrompt,
    adapter_names,
    any_number,
    form_of,
    whole_number,
)
from llmserve.runtime.contract import ALIASES, TYPES
from llmserve_trtllm import SEEN

_PAD, _PENALTY = whole_number(0, 2**31 - 1), any_number(-100, 100)


class EngineLimits:
    """The limits of the engine, as the runtime of the generator ``tensorrt_llm``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.context_length: int = settings["max_seq_len"]
        self.max_input_len: int = settings["max_input_len"]
        self.vocab_size: int = settings["vocab_size"]
        self.max_beam_width: int = settings["max_beam_width"]
        self.eos_ids = frozenset(settings["eos_ids"])
        self.pad_id: int | None = settings["pad_id"]
        # Engines have none, and neither do models that were built before there were any.
        of = settings.get("adapters_of")
        self.home: Path | None = folder.parent.parent / of / folder.name if of else None
        """The version folder that has the adapters, if the model takes any."""
        self._seen, self._folder = settings.get(SEEN, {}), folder

    @cached_property
    def _images(self) -> ImageProcessor:
        # Loaded by the part that reads a request with images, and by no other.
        return ImageProcessor(self._seen, self._folder, context_length=self.context_length)

    def about_images(self) -> dict[str, int] | None:
        return self._images.about()

    def read_images(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation's ids, and those with a mark for each image, which the LLM API
        gets together with the images."""
        return self._images.counted(text, urls)

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give at the moment."""
        return adapter_names(self.home) if self.home else []

    @staticmethod
    def adapter_shapes(settings: Mapping[str, Any], folder: Path) -> ProductShapes:
        """Return the shapes of the products to which adapters may add.

        Builds and ``llmserve adapter`` call it, with the ensemble's version folder.
        """
        from llmserve_trtllm.runtime.adapters import adapter_shapes

        return adapter_shapes(settings["source"], folder)


def array(values: Any, data_type: str) -> npt.NDArray[Any]:
    return np.array(values, TYPES[data_type])


class RequestWriter:
    """Turns a client's request into a request to the engine.

    All inputs are always sent, because Triton batches only requests with the same inputs, and the
    engine's defaults differ between versions: its seed, for example, is always the same.
    """

    def __init__(self, settings: Mapping[str, Any], parts: Parts) -> None:
        self._names: Sequence[str] = settings["sampling"]
        self._no_end: int = settings["no_end"]
        self._refused: Mapping[str, str] = settings["refused"]
        self._limits: EngineLimits = parts.generator
        self._tokenizer = parts.tokenizer
        self._supported = {ALIASES.get(name, name) for name in self._names}

    def write(
        self, prompts: Sequence[Prompt], limits: Sequence[int], words: Any, weights: Any
    ) -> dict[str, Any]:
        """Return preprocessing's outputs, with a row for each prompt.

        ``words`` and ``weights`` are the request's embedding bias tensors, or None.
        """
        for prompt in prompts:
            self._check(prompt.ids, prompt.params)
        params_rows = [prompt.params for prompt in prompts]
        sampling = [self._sampling(prompt) for prompt in prompts]
        pads = [values["pad_id"] for values in sampling]
        # Of a prompt with images, the LLM API itself makes the tokens that stand for them.
        rows = [prompt.ids if prompt.images is None else prompt.images for prompt in prompts]
        width = max(map(len, rows))
        return {
            "INPUT_ID": [
                ids + [pad] * (width - len(ids)) for ids, pad in zip(rows, pads, strict=True)
            ],
            "REQUEST_INPUT_LEN": [[len(ids)] for ids in rows],
            "REQUEST_OUTPUT_LEN": [[limit] for limit in limits],
            "DECODER_INPUT_ID": [[pad] for pad in pads],
            "REQUEST_DECODER_INPUT_LEN": [[1] for _ in prompts],
            "BAD_WORDS_IDS": word_tensor([self._words(params.bad_words) for params in params_rows]),
            "STOP_WORDS_IDS": word_tensor(
                [
                    # The engine accepts one end id; further end ids are sent as stop words.
                    [*self._words(prompt.params.stop_words), *([i] for i in self.ends(prompt)[1:])]
                    for prompt in prompts
                ]
            ),
            "EMBEDDING_BIAS": self._bias(words, weights, len(prompts)),
            "OUT_IMAGE_URL": _padded([params.image_url for params in params_rows]),
            "OUT_ADAPTER": [[(params.adapter or "").encode()] for params in params_rows],
            **{
                f"OUT_{name.upper()}": [[values[ALIASES.get(name, name)]] for values in sampling]
                for name in self._names
            },
        }

    def _sampling(self, prompt: Prompt) -> dict[str, Any]:
        params, ends = prompt.params, self.ends(prompt)
        kind, guide = form_of(params) or ("", "")
        pad = self._limits.pad_id
        if pad is None:
            pad = ends[0] if ends else 0
        read_beams = whole_number(1, self._limits.max_beam_width)
        return {
            "end_id": ends[0] if ends else self._no_end,
            "pad_id": _PAD("pad_id", params.extra.get("pad_id", pad)),
            # A temperature of 0 causes a division by zero in some versions.
            "temperature": 1.0 if params.greedy else params.effective_temperature,
            "top_k": 1 if params.greedy else max(params.top_k, 0),
            "top_p": 1.0 if params.greedy else params.top_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "min_tokens": params.min_tokens,
            "seed": secrets.randbits(64) if params.seed is None else params.seed,
            "beam_width": read_beams("beam_width", params.extra.get("beam_width", 1)),
            "length_penalty": _PENALTY("length_penalty", params.extra.get("length_penalty", 0.0)),
            # The engine ignores an empty or unknown type.
            "guided_decoding_guide_type": kind.encode(),
            "guided_decoding_guide": guide.encode(),
        }

    def _bias(self, words: Any, weights: Any, rows: int) -> npt.NDArray[np.float32]:
        """Return for each row a bias for each id of the vocabulary; no columns without words."""
        if words is None and weights is None:
            return np.zeros((rows, 0), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "embedding_bias_words and embedding_bias_weights differ in length",
                code="conflicting_options",
                param="embedding_bias_weights",
            )
        bias = np.zeros((rows, self._limits.vocab_size), np.float32)
        for row in range(rows):
            for word, weight in zip(words[row].tolist(), weights[row].tolist(), strict=True):
                try:
                    text = word.decode() if isinstance(word, bytes) else str(word)
                except UnicodeDecodeError:
                    raise RequestError(
                        "embedding_bias_words is not UTF-8",
                        code="invalid_value",
                        param="embedding_bias_words",
                    ) from None
                for token in set(self._tokenizer.encode(text, special=False)):
                    bias[row, token] += weight
        return bias

    def _check(self, ids: Sequence[int], params: Params) -> None:
        limit = self._limits.max_input_len
        if len(ids) > limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the engine accepts {limit} of its context "
                f"of {self._limits.context_length}: shorten the prompt, or rebuild the engine",
                code="context_length_exceeded",
                context=limit,
                prompt_tokens=len(ids),
            )
        for name, problem in self._refused.items():
            if getattr(params, name):
                raise RequestError(problem, code="unsupported_option", param=name)
        for name in ("frequency_penalty", "presence_penalty", "min_tokens"):
            if name not in self._supported and getattr(params, name):
                problem = f"this engine's version of TensorRT-LLM has no {name}"
                raise RequestError(problem, code="unsupported_option", param=name)
        if "guided_decoding_guide" not in self._supported and form_of(params):
            raise RequestError(
                "this model's answers cannot be constrained: build it for 0.19 or later with "
                "--set guided_decoding_backend=xgrammar",
                code="unsupported_option",
            )
        if params.adapter and self._limits.home is None:
            raise RequestError(
                "this model takes no adapters by name: one that reads no images does, built with "
                "--set layout=llmapi, for TensorRT-LLM 1.1 or later",
                code="unsupported_option",
                param="adapter",
            )
        if params.top_k > 1024:
            problem = f"top_k must be at most 1024, not {params.top_k}"
            raise RequestError(problem, code="invalid_value", param="top_k")

    def ends(self, prompt: Prompt) -> list[int]:
        """Return the ids that end the answer; those that the engine was built with come first."""
        if prompt.params.ignore_eos:
            return []
        built_in = self._limits.eos_ids
        ends = prompt.params.ends(built_in | self._tokenizer.eos_ids | prompt.ends)
        return sorted(ends, key=lambda end: (end not in built_in, end))

    def _words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of each word, both at the beginning of a text and after a space.

        Special tokens are left out: no text has a BOS in the middle, so the word would never match.
        """
        forms = [form for word in words for form in (word, f" {word}")]
        ids_of_forms = [tuple(self._tokenizer.encode(form, special=False)) for form in forms]
        return [list(ids) for ids in dict.fromkeys(ids_of_forms) if ids]


def _padded(rows: Sequence[Sequence[str]]) -> list[list[bytes]]:
    """Return texts in columns, one at least."""
    width = max(1, *map(len, rows))
    return [[text.encode() for text in row] + [b""] * (width - len(row)) for row in rows]


def word_tensor(rows: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Return words in the backend's form: all ids of a row, and below them the ends of the words.

    >>> word_tensor([[[5, 6], [7]], []]).tolist()
    [[[5, 6, 7], [2, 3, -1]], [[0, 0, 0], [-1, -1, -1]]]
    """
    flat = [[token for word in row for token in word] for row in rows]
    width = max((len(ids) for ids in flat), default=0)
    tensor = np.zeros((len(rows), 2, width), np.int32)
    tensor[:, 1] = -1
    for index, (row, ids) in enumerate(zip(rows, flat, strict=True)):
        tensor[index, 0, : len(ids)] = ids
        tensor[index, 1, : len(row)] = np.cumsum([len(word) for word in row])
    return tensor


def words_of(tensor: npt.NDArray[np.int32]) -> list[list[int]]:
    ends = [int(end) for end in tensor[1] if end > 0]
    starts = [0, *ends]
    return [tensor[0, a:b].tolist() for a, b in zip(starts, ends, strict=False)]
