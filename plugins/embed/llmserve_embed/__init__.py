"""The plugin ``embed``: models that answer with values: embeddings, scores of pairs, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.plugin import (
    CLASSIFIER,
    DTYPE_OPTION,
    ENCODER,
    PLACEMENT_OPTIONS,
    BuildContext,
    Generator,
    ModelSize,
    Needs,
    Option,
    Recipe,
    Value,
    hookimpl,
    place_needs,
)

_BATCH_TOKENS = Option(
    "batch_tokens",
    4096,
    "Texts are computed together up to this many tokens, those of like lengths first.",
    minimum=1,
)
_MAX_LENGTH = Option(
    "max_length",
    0,
    "The most tokens of a text; 0 is what the model's own files say.",
    minimum=0,
)
_POOLING = Option(
    "pooling",
    "auto",
    "How the vectors of a text's tokens become one; auto is what the model's files say, else last "
    "for a causal language model and mean for others.",
    choices=("auto", "mean", "cls", "last", "max"),
)
_TORCH = (*PLACEMENT_OPTIONS, _BATCH_TOKENS, _MAX_LENGTH)
_OPENVINO = (
    DTYPE_OPTION,
    Option("device", "auto", "Where the model runs: the CPU."),
    # Passes that are computed at the same time should end at the same time.
    replace(_BATCH_TOKENS, default=1024),
    _MAX_LENGTH,
    Option(
        "weight_format",
        "auto",
        "How weights are stored when a model is converted. auto changes none: those that are exact "
        "in 16 bits are stored in 16 bits.",
        choices=("auto", "fp32", "fp16", "bf16", "int8"),
    ),
    Option(
        "dynamic_quantization",
        32,
        "With int8 weights, how many activations share a scale; 0 leaves them unchanged.",
        minimum=0,
    ),
    Option(
        "file",
        "",
        "A file of the model in ONNX's or OpenVINO's form, such as onnx/model_qint8_avx512.onnx, "
        "to compute with as it is.",
    ),
    Option(
        "streams",
        0,
        "Passes that are computed at the same time, each on its share of the cores; 0 is what "
        "OpenVINO considers best for many texts, 1 is fastest for a single long one.",
        minimum=0,
    ),
    Option("threads", 0, "Threads for computation; 0 means one per core.", minimum=0),
)
_ONNX = (
    Option("file", "onnx/model.onnx", "The graph: a file of the model in ONNX's form."),
    Option("device", "cpu", "Where the graph runs: cpu, cuda (the first GPU) or cuda:N."),
    _BATCH_TOKENS,
    _MAX_LENGTH,
)
# A model may have no other weights than a file that is named.
_OPENVINO_WEIGHTS = ("*.safetensors", "*.onnx", "onnx/*.onnx", "*.xml", "openvino/*.xml")
_ONNX_WEIGHTS = ("*.onnx", "onnx/*.onnx")
_TORCH_PACKAGES = ("accelerate", "numpy", "torch", "transformers")
_OPENVINO_PACKAGES = ("numpy", "openvino")
_ONNX_PACKAGES = ("numpy", "onnxruntime")
_CLIENT = "llmserve.client.value_script"
# A request of 256 texts is one batch.
_DEFAULTS = {"max_batch_size": 256}


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="encoder",
            summary="A transformer whose states are pooled to a vector for each text",
            runtime="llmserve_embed.engine:TorchEncoder",
            prepare=_prepare_encoder,
            needs=place_needs,
            options=(*_TORCH, _POOLING),
            answers="vector",
            architectures=ENCODER.suffixes,
            requires=_TORCH_PACKAGES,
        ),
        Generator(
            name="encoder-openvino",
            summary="The same on OpenVINO, for CPUs",
            runtime="llmserve_embed.engine:OpenVinoValues",
            prepare=_prepare_openvino_encoder,
            needs=_openvino_needs,
            options=(*_OPENVINO, _POOLING),
            answers="vector",
            architectures=ENCODER.suffixes,
            requires=_OPENVINO_PACKAGES,
            weights=_OPENVINO_WEIGHTS,
        ),
        Generator(
            name="encoder-onnx",
            summary="The same as a graph that the model brings, in Triton's backend for ONNX",
            runtime="llmserve_embed.graph:GraphValues",
            prepare=_prepare_encoder_of_graph,
            options=(*_ONNX, _POOLING),
            answers="vector",
            architectures=ENCODER.suffixes,
            requires=_ONNX_PACKAGES,
            weights=_ONNX_WEIGHTS,
        ),
        Generator(
            name="classifier",
            summary="A transformer that computes logits of a text, or of a pair of texts",
            runtime="llmserve_embed.engine:TorchClassifier",
            prepare=_prepare_classifier,
            needs=place_needs,
            options=_TORCH,
            answers="logits",
            architectures=CLASSIFIER.suffixes,
            requires=_TORCH_PACKAGES,
        ),
        Generator(
            name="classifier-openvino",
            summary="The same on OpenVINO, for CPUs",
            runtime="llmserve_embed.engine:OpenVinoValues",
            prepare=_prepare_openvino_classifier,
            needs=_openvino_needs,
            options=_OPENVINO,
            answers="logits",
            architectures=CLASSIFIER.suffixes,
            requires=_OPENVINO_PACKAGES,
            weights=_OPENVINO_WEIGHTS,
        ),
        Generator(
            name="classifier-onnx",
            summary="The same as a graph that the model brings, in Triton's backend for ONNX",
            runtime="llmserve_embed.graph:GraphValues",
            prepare=_prepare_classifier_of_graph,
            options=_ONNX,
            answers="logits",
            architectures=CLASSIFIER.suffixes,
            requires=_ONNX_PACKAGES,
            weights=_ONNX_WEIGHTS,
        ),
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    engine = "-openvino" if _is_for_openvino() else ""
    return [
        Recipe(
            name=name,
            summary=summary,
            tokenizer="encoder",
            generator=f"{generator}{engine}",
            batching="dynamic",
            formatter=formatter,
            defaults=_DEFAULTS,
            client=_CLIENT,
        )
        for name, summary, generator, formatter in (
            ("embed", "Embeddings of texts", "encoder", "embedding"),
            ("rerank", "Documents ranked by a query", "classifier", "scores"),
            ("classify", "Labels of texts, or of pairs", "classifier", "labels"),
        )
    ]


def _is_for_openvino() -> bool:
    """Whether this machine, which has no GPU, has OpenVINO: then it is the faster one."""
    return find_spec("openvino") is not None and not Path("/dev/nvidiactl").exists()


def _openvino_needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    from llmserve_embed.needs import openvino_needs

    return openvino_needs(size, options)


def _prepare_encoder(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_embed.prepare import prepare_torch

    return prepare_torch(context, ENCODER, pools=True)


def _prepare_openvino_encoder(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_embed.prepare import prepare_openvino

    return prepare_openvino(context, ENCODER, pools=True)


def _prepare_classifier(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_embed.prepare import prepare_torch

    return prepare_torch(context, CLASSIFIER, pools=False)


def _prepare_openvino_classifier(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_embed.prepare import prepare_openvino

    return prepare_openvino(context, CLASSIFIER, pools=False)


def _prepare_encoder_of_graph(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_embed.prepare import prepare_graph

    return prepare_graph(context, ENCODER, pools=True)


def _prepare_classifier_of_graph(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_embed.prepare import prepare_graph

    return prepare_graph(context, CLASSIFIER, pools=False)
