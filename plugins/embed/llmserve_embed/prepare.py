"""Places or converts a model at build time, and returns its settings for the runtime."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.plugin import (
    BuildContext,
    ModelKind,
    ModelSource,
    ModelSourceError,
    OptionError,
    allowed,
    check_kind,
    encoder_layout,
    max_length,
    place_instances,
    place_model,
    read_object,
    refuse_shortage,
    run_program,
)
from llmserve_embed.files import brought

_FOLDER = "openvino"
# As many as RoBERTa has around a pair of texts.
_SPECIAL = 4
_PRECISIONS = {"auto": "auto", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def prepare_torch(context: BuildContext, kind: ModelKind, *, pools: bool) -> Mapping[str, Any]:
    """Place a model that transformers loads."""
    return {**_common(context, kind, pools=pools), **place_model(context), "loader": kind.loader}


def prepare_graph(context: BuildContext, kind: ModelKind, *, pools: bool) -> Mapping[str, Any]:
    """Place a graph that the model brings as a model of its own, which this one calls."""
    from llmserve_embed.native import check_device, place_graph

    check_device(str(context.options["device"]))
    settings = _common(context, kind, pools=pools)
    place_instances(context.config, "cpu", 1)
    graph = context.add_part("graph", backend="onnxruntime")
    return {**settings, "graph": place_graph(graph, pools=pools)}


def prepare_openvino(context: BuildContext, kind: ModelKind, *, pools: bool) -> Mapping[str, Any]:
    """Convert a model to OpenVINO's form, or place a file of it that has such a form."""
    from llmserve_embed.compiled import MODEL

    options = context.options
    if options["device"] not in ("auto", "cpu"):
        raise OptionError(
            f"OpenVINO computes on the CPU, not on {options['device']}",
            hint=f"choose transformers with --generator {'encoder' if pools else 'classifier'}",
        )
    common = _common(context, kind, pools=pools)
    place_instances(context.config, "cpu", 1)
    file = str(options["file"])
    if file:
        _place(context, file, pools=pools)
    else:
        _convert(context, {"loader": kind.loader, "padding": common["padding"]})
    return {
        **common,
        "path": f"{_FOLDER}/{Path(file).name or MODEL}",
        "precision": _PRECISIONS[str(options["dtype"])],
        "half_weights": _dtype(context) in ("bfloat16", "float16"),
        "dynamic_quantization": options["dynamic_quantization"],
        "streams": options["streams"],
        "threads": options["threads"],
    }


def _common(context: BuildContext, kind: ModelKind, *, pools: bool) -> dict[str, Any]:
    options = context.options
    check_kind(context.source, kind, **allowed(context))
    longest, chosen = max_length(context.source), int(options["max_length"])
    if 0 < chosen <= _SPECIAL:
        raise OptionError(
            f"with max_length={chosen}, the special tokens of a pair leave no place for its texts",
            hint=f"give at least {_SPECIAL + 1}",
        )
    if longest and chosen > longest:
        raise OptionError(
            f"{context.model} reads at most {longest} tokens, not {chosen}",
            hint="give a smaller max_length",
        )
    settings = {
        "max_length": chosen or longest,
        "batch_tokens": options["batch_tokens"],
        "padding": _padding(context.source),
    }
    return {**settings, "pooling": _pooling(context)} if pools else settings


def _pooling(context: BuildContext) -> str:
    layout, chosen = encoder_layout(context.source), str(context.options["pooling"])
    pooling = layout.pooling if chosen == "auto" else chosen
    context.report(f"its tokens' vectors become one by {pooling} pooling")
    return pooling


def _padding(source: ModelSource) -> int:
    """Return the id to pad with: a decoder with a head takes a row's last other token.

    So it must be none that texts end with.
    """
    config = source.config()
    text = config.get("text_config") or config
    ends = text.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    # A token that was added to the tokenizer alone has no row in the model.
    rows = text.get("vocab_size")
    ids = range(rows if isinstance(rows, int) else sys.maxsize)
    for found in (text.get("pad_token_id"), _tokenizers_padding(source), *ends):
        if isinstance(found, int) and found in ids:
            return found
    return 0


def _tokenizers_padding(source: ModelSource) -> int | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _optional(source.path / name).get("pad_token")
        text = token.get("content") if isinstance(token, dict) else token
        for added in _optional(source.path / "tokenizer.json").get("added_tokens") or ():
            if text is not None and added.get("content") == text:
                return int(added["id"])
    return None


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _dtype(context: BuildContext) -> Any:
    config = context.source.config()
    return config.get("dtype") or config.get("torch_dtype")


def _place(context: BuildContext, name: str, *, pools: bool) -> None:
    """Copy a file that the model brings, with its weights if they are beside it."""
    from llmserve_embed.compiled import read, values_of

    if context.options["weight_format"] != "auto":
        raise OptionError(
            f"the weights in {name} stay as they are", hint="leave out weight_format, or file"
        )
    file, beside = brought(context, name, (".onnx", ".xml"))
    # Libraries refuse weights that are linked from elsewhere, as in the hub's cache.
    context.place([file, *beside], _FOLDER, copy=True)
    try:
        values_of(read(context.folder / _FOLDER / file.name), "mean" if pools else None)
    except ValueError as error:
        raise ModelSourceError(
            f"{name} of {context.source.asked} cannot be used: {error}",
            hint="name another file of it, or leave out file",
        ) from None


def _convert(context: BuildContext, settings: Mapping[str, Any]) -> None:
    """Convert in a separate process."""
    source, options = context.source, context.options
    patterns = ("*.safetensors", "*.bin") if options["pickle"] else ("*.safetensors",)
    if not any(any(source.path.glob(pattern)) for pattern in patterns):
        raise ModelSourceError(
            f"{source.asked} has no weights that can be converted: no {' or '.join(patterns)}",
            hint="if it has them in ONNX's or OpenVINO's form, name the file, such as --set "
            "file=onnx/model.onnx",
        )
    chosen = {n: options[n] for n in ("weight_format", "pickle", "trust_remote_code")}
    # Beside a bar, a whole path would leave no room for it.
    name = Path(source.asked).name if Path(source.asked).exists() else source.asked
    words = f"converting {name} to OpenVINO"
    ended = run_program(
        [
            *(sys.executable, "-m", "llmserve_embed.convert"),
            *(str(source.path), str(context.folder / _FOLDER), json.dumps({**chosen, **settings})),
        ],
        words=words,
        report=context.report,
    )
    refuse_shortage(ended, context.folder, words)
    if ended.code:
        generator = "encoder" if "pooling" in options else "classifier"
        raise ModelSourceError(
            f"{source.asked} could not be converted to OpenVINO: {ended.reason}",
            hint=f"serve it with transformers: --generator {generator}",
        )
