"""Prompts of a model that reads images, in the form in which the LLM API takes them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import ImageProcessor, RequestError, located


class SeeingPrompts:
    """Makes texts and images of tokens and data URLs.

    TensorRT-LLM's processors make tokens of texts. It would also take ours, but only to make a text
    of them (LLM.generate_async in llmapi/llm.py of 1.2), and gives none to a processor where there
    is no image, although Qwen's models need its positions also then (a note in
    modeling_qwen2vl.py says so). So each prompt is a text here, which means exactly its tokens.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        location, options = located(settings, folder)
        self._tokenizer = AutoTokenizer.from_pretrained(location, **options)
        # What a request has is counted where it is read.
        self._images = ImageProcessor(settings, folder, context_length=None)
        # One process decodes, and requests are answered in threads.
        self._decoding = threading.Lock()

    def prompt(self, ids: Sequence[int], urls: Sequence[str]) -> dict[str, Any]:
        """Return a prompt; refuse images that cannot be read, or that have no mark in it."""
        text = self._text([*ids])
        with self._decoding:
            _, images = self._images.marked(text, urls)
        return {"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})}

    def _text(self, ids: list[int]) -> str:
        """Return the text that TensorRT-LLM reads as these tokens.

        Its processors put before every text what the tokenizer puts there, such as a BOS: a
        template's own is left out, so that there are not two, and one that the template lacks comes
        in addition.
        """
        text = self._decoded(ids)
        for each in (text, self._decoded(ids[1:])):
            if self._read(each) == ids:
                return each
        read = self._read(text)
        if read[len(read) - len(ids) :] == ids:
            return text
        raise RequestError(
            "TensorRT-LLM reads images with a text, and no text has exactly these tokens: send "
            "text_input or messages",
            code="invalid_value",
            param="input_ids",
        )

    def _read(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
