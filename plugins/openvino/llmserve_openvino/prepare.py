"""Places or converts a model at build time, and returns its settings for the runtime."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.plugin import (
    BuildContext,
    ModelSourceError,
    OptionError,
    UnservedError,
    allowed,
    check_causal,
    checked_processor,
    draft_context,
    has_kept_weights,
    is_for_text,
    note_unread,
    place_adapters,
    place_instances,
    quantised_in,
    refuse_shortage,
    run_program,
    sees_images,
    take_images,
)
from llmserve.runtime import embeds_images
from llmserve.runtime.causal import original_length
from llmserve_openvino import RUNTIME

_FOLDER = "openvino"
_UNSERVED = 69
"""As in the converter, whose imports take seconds."""
_DRAFT = "draft"
_IMAGES = "images"
"""The folder of what reads images."""
_MODEL = "openvino_model.xml"
# Only these: the tokenizer is a separate part of the model, whatever its form.
_FILES = (_MODEL, "openvino_model.bin")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_PRECISIONS = {"auto": "auto", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_ROUNDED = ("fp16", "bf16", "int8", "int4")
_LOAD_OPTIONS = (
    "kv_cache", "cache_gb", "max_sequences", "prefix_cache", "dynamic_quantization",
    "exact_batches", "prompt_lookup", "draft_tokens", "adapter_mb", "state_mb", "threads",
)  # fmt: skip
_CONVERSION_OPTIONS = ("weight_format", "int4_group", "int4_ratio", "pickle", "trust_remote_code")


def prepare(context: BuildContext) -> Mapping[str, Any]:
    """Place a model that is already converted, or convert it."""
    source, options = context.source, context.options
    sees, images = _check(context)
    place_instances(context.config, "cpu", 1)
    draft = draft_context(context)
    config, length = source.config(), _length(source.config())
    text_config = config.get("text_config") or config
    if text_config.get("attn_logit_softcapping") and options["kv_cache"] == "u8":
        raise OptionError(
            f"{source.asked} caps its attention scores: its cache cannot be in 8 bits",
            hint="leave out kv_cache, or choose f16",
        )
    if options["exact_batches"]:
        _check_exact_config(text_config, options, source.asked)
    placement, served = _place_or_convert(context, _FOLDER, sees=sees, reads=bool(images))
    if options["exact_batches"]:
        _check_exact(context.folder / placement["path"] / _MODEL)
    place_adapters(context, RUNTIME, placement)
    if served and (length is None or served < length):
        context.report(
            f"of its context of {length} tokens, {served} are served: beyond them it attends or "
            "rotates differently, which openvino cannot do; hf serves all"
        )
        length = served
    dtype = text_config.get("dtype") or text_config.get("torch_dtype")
    return {
        **placement,
        **{name: options[name] for name in _LOAD_OPTIONS},
        **(_place_draft(draft) if draft else {"draft": None}),
        "images": images,
        "context_length": length,
        "eos_ids": source.end_ids(),
        "precision": _PRECISIONS[str(options["dtype"])],
        "half_weights": dtype in ("bfloat16", "float16") or options["weight_format"] in _ROUNDED,
    }


def _check(context: BuildContext) -> tuple[bool, Mapping[str, Any] | None]:
    """Check a model; return whether it is loaded with what reads images, and the settings of that.

    One that is built for text alone has no such settings.
    """
    source = context.source
    is_converted = (source.path / _MODEL).is_file()
    sees = not is_converted and sees_images(source, causal=True) and not is_for_text(context)
    if sees and embeds_images(source.config(), wholes=True, grids=True, layers=True):
        if found := quantised_in(source.path):
            raise UnservedError(
                f"openvino cannot serve {source.asked}: it reads images, and is quantised "
                f"({found}){_for_text(context)}"
            )
        return True, _place_processor(context, take_images(context, requires=("torch",)))
    check_causal(source, **allowed(context))
    if sees:
        by_iterative = embeds_images(
            source.config(), wholes=True, grids=True, layers=True, causal=True
        )
        note_unread(context, "openvino", instead="iterative" if by_iterative else "hf")
    return False, None


def _for_text(context: BuildContext) -> str:
    """Return with what such a model is built for its text, if its kind can be."""
    try:
        check_causal(context.source, **allowed(context))
    except ModelSourceError:
        return ""
    return ", which goes with max_images=0 alone"


def _place_processor(context: BuildContext, limits: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings of what reads images; None for a build for text alone."""
    files = [file for file in checked_processor(context) if file.name != "config.json"]
    return {**context.place(files, _IMAGES, copy=True), **limits} if files else None


def _length(config: Mapping[str, Any]) -> int | None:
    text_config = config.get("text_config") or config
    lengths = [text_config[name] for name in _LENGTHS if isinstance(text_config.get(name), int)]
    return next(iter(lengths), None)


def _place_draft(context: BuildContext) -> Mapping[str, Any]:
    placement, served = _place_or_convert(context, _DRAFT)
    lengths = [length for length in (_length(context.source.config()), served) if length]
    return {"draft": placement["path"], "draft_length": min(lengths, default=None)}


def _place_or_convert(
    context: BuildContext, folder: str, *, sees: bool = False, reads: bool = False
) -> tuple[Mapping[str, Any], int | None]:
    """Return where it is, and up to which length it is exact; None if it always is."""
    if (context.source.path / _MODEL).is_file():
        config = context.source.config()
        return _place(context, folder), original_length(config.get("text_config") or config)
    return _convert(context, folder, sees=sees, reads=reads)


def _place(context: BuildContext, folder: str) -> Mapping[str, Any]:
    source = context.source
    files = [source.path / name for name in _FILES if (source.path / name).is_file()]
    if len(files) < len(_FILES):
        raise ModelSourceError(f"{source.asked} has {_MODEL} without openvino_model.bin")
    if context.options["weight_format"] != "auto":
        raise OptionError(
            f"{source.asked} is already converted, and its weights stay as they are",
            hint="leave out weight_format, or name the model that it was converted from",
        )
    _check_attention(source.path / _MODEL)
    # The engine opens files, so a model in the hub's cache is copied.
    return context.place(files, folder, copy=True if source.repo_id else None)


def _check_attention(model: Path) -> None:
    """Refuse a model that its runner could not load; the weights are only mapped."""
    from llmserve_openvino.runner import paged
    from llmserve_openvino.workarounds import read_model

    try:
        read = read_model(str(model))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ModelSourceError(f"{model} cannot be read: {reason}") from None
    paged(read)


def _check_exact_config(config: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    from llmserve_openvino.exact import check_config

    check_config(config, options, name)


def _check_exact(model: Path) -> None:
    from llmserve_openvino.exact import check_graph
    from llmserve_openvino.workarounds import read_model

    check_graph(read_model(str(model)))


def _convert(
    context: BuildContext, folder: str, *, sees: bool, reads: bool
) -> tuple[Mapping[str, Any], int | None]:
    options = context.options
    target = context.folder / folder
    settings = {name: options[name] for name in _CONVERSION_OPTIONS}
    settings |= {"sees": sees, "images": str(context.folder / _IMAGES) if reads else ""}
    _run(context, target, {**settings, "in_gguf": has_kept_weights(context.source)})
    facts = target / "facts.json"
    told = json.loads(facts.read_text(encoding="utf-8"))
    facts.unlink()
    if numbers := told["tower"]:
        context.report(
            f"what reads images is computed by PyTorch, and takes {4 * numbers / 1e6:.0f} MB in "
            f"float32, {2 * numbers / 1e6:.0f} MB in bfloat16"
        )
    if found := quantised_in(context.source.path):
        kept = "its quantised weights stay in their bits"
        if told["widened"]:
            kept = f"{told['widened']} of its weights are widened to 16 bits (bfloat16)"
        size = (target / _FILES[1]).stat().st_size
        takes = f"{size / 1e6:.0f} MB, and {2 * told['parameters'] / 1e6:.0f} in 16 bits"
        context.report(f"{context.source.asked} is quantised ({found}): {kept}, {takes}")
    served: int | None = told["served"]
    return {"path": folder}, served


def _run(context: BuildContext, target: Path, settings: Mapping[str, Any]) -> None:
    """Convert in a separate process."""
    source = context.source
    # Beside a bar, a whole path would leave no room for it.
    name = Path(source.asked).name if Path(source.asked).exists() else source.asked
    words = f"converting {name} to OpenVINO"
    command = [sys.executable, "-m", "llmserve_openvino.convert"]
    ended = run_program(
        [*command, str(source.path), str(target), json.dumps(settings)],
        words=words,
        report=context.report,
    )
    refuse_shortage(ended, context.folder, words)
    if ended.code == _UNSERVED:
        raise UnservedError(f"openvino cannot serve {source.asked}: it {ended.reason}")
    if ended.code:
        raise UnservedError(f"{source.asked} could not be converted to OpenVINO: {ended.reason}")
