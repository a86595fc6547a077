"""Converts a GGUF file to a model's folder, with transformers' own reader.

It runs as a separate program: what the reader takes, up to the model's size in 16 bits beside its
largest tensor, is freed when it ends, and what it prints is of no use as long as it succeeds.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from llmserve.builder.gguf.header import GgufHeader, read_header
from llmserve.builder.gguf.keep import NOT_WEIGHTS, Unknown, write_kept
from llmserve.builder.gguf.rope import rope_parameters
from llmserve.builder.gguf.workarounds import is_full, remembered
from llmserve.builder.programs import tell_done

RESULT = "conversion.json"
"""What the build needs to know; beside the model, in the same folder."""
_SHARD = "2GB"
_READING = 0.5
"""The share of the time that widening takes; making the model and writing it take the rest."""
_SPECIAL_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Not always named in the file, and known to every program that reads GGUF.
_ENDS_OF_TURNS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endofturn|>",
    "<|end_of_turn|>", "<EOT>", "<|return|>", "<turn|>",
}  # fmt: skip


class Refused(Exception):
    """The model cannot be converted; the message continues "FILE …"."""


class NotWritten(Exception):
    """The model was read, and cannot be written; the message says why."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(first_line(reason))
        self.is_full = is_full(reason)


def convert(path: Path, target: Path, dtype: str, *, keeps: bool = False) -> dict[str, Any]:
    """Write the model and its tokenizer into ``target``; return what there is to report.

    With ``keeps``, weights in blocks stay in the file, if that is possible.
    """
    header = read_header(path)
    check_types(header)
    config = read_config(header)
    tokenizer = read_tokenizer(header)
    notes = apply_rope(config, header)
    if keeps:
        try:
            return {"notes": notes} | keep(header, config, tokenizer, target, dtype)
        except Unknown as reason:
            notes.append(f"its weights are widened, as they cannot be kept: {reason}")
    model = load(header, config, dtype)
    notes += unused_weights(header, model)
    plain = without_quantizer(model, config)
    plain.generation_config.eos_token_id = end_ids(header, tokenizer, config)
    try:
        plain.save_pretrained(target, max_shard_size=_SHARD)
        tokenizer.save_pretrained(target)
    except Exception as error:
        raise NotWritten(error) from None
    return {"notes": notes, "bytes": let_others_read(target)}


def keep(
    header: GgufHeader, config: Any, tokenizer: Any, target: Path, dtype: str
) -> dict[str, Any]:
    """Write what a model needs beside the weights that stay in the file."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    notes = unused_weights(header, model)
    model.config.dtype = getattr(torch, dtype)
    model.config.architectures = [type(model).__name__]
    model.generation_config.eos_token_id = end_ids(header, tokenizer, config)
    try:
        size, widened = write_kept(header, model, target)
        model.config.save_pretrained(target)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except (OSError, SafetensorError) as error:
        raise NotWritten(error) from None
    let_others_read(target)
    return {"notes": notes, "bytes": size, "kept": True, "widened": widened}


def load(header: GgufHeader, config: Any, dtype: str) -> Any:
    """Return the model with all of its weights widened."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = header.path
    with telling(len(header.tensors)):
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=getattr(torch, dtype),
            # Otherwise it may fetch a kernel, which is code.
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            output_loading_info=True,
        )
    check_loaded(info)
    return model


def let_others_read(target: Path) -> int:
    """Let others read the weights, as Triton may have to: the library does not; return bytes."""
    weights = [*target.glob("*.safetensors")]
    for file in weights:
        file.chmod((target / "config.json").stat().st_mode)
    return sum(file.stat().st_size for file in weights)


@contextmanager
def telling(count: int) -> Iterator[None]:
    """Tell the build how many of the tensors have been widened: the rest takes as long again."""
    import gguf

    original, done = gguf.dequantize, itertools.count(1)

    def dequantize(*args: Any, **options: Any) -> Any:
        tell_done(next(done) / count * _READING)
        return original(*args, **options)

    gguf.dequantize = dequantize
    try:
        yield
    finally:
        gguf.dequantize = original


def check_types(header: GgufHeader) -> None:
    """Refuse weights that the package gguf cannot widen, by widening one block of each type."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    for kind in sorted({tensor.kind for tensor in header.tensors}):
        known = GGMLQuantizationType(kind)
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[known][1], np.uint8), known)
        except NotImplementedError:
            raise Refused(
                f"has weights of the type {known.name}, which gguf cannot widen"
            ) from None


def read_config(header: GgufHeader) -> Any:
    """Return the model's configuration; refuse an architecture that transformers does not read."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = transformers.AutoConfig.from_pretrained(
            header.path.parent, gguf_file=header.path.name, local_files_only=True
        )
    except Exception as error:
        version = transformers.__version__
        raise Refused(
            f"is of the architecture {header.architecture!r}, of which transformers {version} "
            f"cannot read this file ({first_line(error)})"
        ) from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise Refused(
            f"is of the architecture {header.architecture!r}, which is no causal language model"
        )
    complete_config(config, header)
    return config


def complete_config(config: Any, header: GgufHeader) -> None:
    """Set what transformers leaves at the defaults of a class: ``OTHER_DEFAULTS``."""
    length = header.own("context_length")
    if isinstance(length, int) and hasattr(config, "n_positions"):
        # It is read as n_ctx, which nothing uses.
        config.n_positions = length
    for name, in_file in _SPECIAL_IDS.items():
        if not isinstance(getattr(config, name, None), list):
            setattr(config, name, header.facts.get(f"tokenizer.ggml.{in_file}"))


def read_tokenizer(header: GgufHeader) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            header.path.parent, gguf_file=header.path.name, local_files_only=True
        )
    except Exception as error:
        kind = header.facts.get("tokenizer.ggml.model")
        raise Refused(
            f"has a tokenizer, {str(kind)[:64]!r}, that transformers cannot read "
            f"({first_line(error)})"
        ) from None


def apply_rope(config: Any, header: GgufHeader) -> list[str]:
    """Give the configuration what stretches the context: ``STRETCH_LEFT_OUT``."""
    present = getattr(config, "rope_parameters", None)
    if present is None or present.get("rope_type", "default") != "default":
        return []
    found = rope_parameters(header)
    if found is None:
        return []
    if not found:
        return ["how its context is stretched is not known: long prompts are answered worse"]
    config.rope_parameters = {**present, **found}
    return []


def check_loaded(info: dict[str, Any]) -> None:
    """Refuse a model with weights that the file did not have: they would be random."""
    missing = sorted(map(str, info.get("missing_keys") or ()))
    if missing:
        raise Refused(f"lacks {len(missing)} of the model's weights, such as {missing[0]}")


def unused_weights(header: GgufHeader, model: Any) -> list[str]:
    """Report weights that transformers has left out, such as biases that it does not expect."""
    in_file = sum(
        tensor.elements for tensor in header.tensors if not tensor.name.startswith(NOT_WEIGHTS)
    )
    used = sum(parameter.numel() for parameter in {*model.parameters()})
    if in_file <= used:
        return []
    return [f"{in_file - used} of its {in_file} weights have no place in transformers' model"]


def without_quantizer(model: Any, config: Any) -> Any:
    """Return the same weights as a model that can be saved: ``NOT_SAVED``."""
    import torch

    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.config.dtype = model.dtype
    return plain


def end_ids(header: GgufHeader, tokenizer: Any, config: Any) -> int | list[int] | None:
    """Return the tokens that end an answer: those that the file names, and its template's."""
    found = [header.facts.get(f"tokenizer.ggml.{name}") for name in _END_IDS]
    ids = {token for token in found if isinstance(token, int)}
    own = config.get_text_config().eos_token_id
    ids |= {*own} if isinstance(own, list) else set()
    template = str(header.facts.get("tokenizer.chat_template") or "")
    ids |= {
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.content in _ENDS_OF_TURNS and added.content in template
    }
    ordered = sorted(token for token in ids if 0 <= token < len(tokenizer))
    return ordered[0] if len(ordered) == 1 else ordered or None


def first_line(error: BaseException) -> str:
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def main(path: Path, target: Path, dtype: str, *, keeps: bool = False) -> None:
    target.mkdir(parents=True, exist_ok=True)
    try:
        with remembered():
            result = convert(path, target, dtype, keeps=keeps)
    except Refused as error:
        result = {"refused": str(error)}
    except NotWritten as error:
        # What is there would be of no use, and the result has to fit.
        shutil.rmtree(target)
        target.mkdir()
        result = {"not_written": str(error), "is_full": error.is_full}
    except Exception as error:
        result = {"refused": f"cannot be read by transformers: {first_line(error)}"}
    (target / RESULT).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], keeps=sys.argv[4:] == ["keep"])
