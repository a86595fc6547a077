"""The plugin ``embed``: models that answer with values: embeddings, scores of pairs, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import (
    CLASSIFIER,
    ENCODER,
    PLACEMENT_OPTIONS,
    BuildContext,
    Generator,
    ModelKind,
    Option,
    OptionError,
    Recipe,
    check_kind,
    encoder_layout,
    hookimpl,
    max_length,
    place_model,
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
    "How the vectors of a text's tokens become one; auto is what the model's files say, else mean.",
    choices=("auto", "mean", "cls", "last", "max"),
)
_CLIENT = "llmserve.client.value_script"
# A request of 256 texts is one batch.
_DEFAULTS = {"max_batch_size": 256}


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    needed = ("accelerate", "numpy", "torch", "transformers")
    options = (*PLACEMENT_OPTIONS, _BATCH_TOKENS, _MAX_LENGTH)
    return [
        Generator(
            name="encoder",
            summary="A transformer whose states are pooled to a vector for each text",
            runtime="llmserve_embed.engine:TorchEncoder",
            prepare=_prepare_encoder,
            options=(*options, _POOLING),
            answers="vector",
            requires=needed,
        ),
        Generator(
            name="classifier",
            summary="A transformer that computes logits of a text, or of a pair of texts",
            runtime="llmserve_embed.engine:TorchClassifier",
            prepare=_prepare_classifier,
            options=options,
            answers="logits",
            requires=needed,
        ),
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name=name,
            summary=summary,
            tokenizer="encoder",
            generator=generator,
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


def _prepare_encoder(context: BuildContext) -> Mapping[str, Any]:
    chosen = str(context.options["pooling"])
    settings = _prepare(context, ENCODER)
    layout = encoder_layout(context.source)
    pooling = layout.pooling if chosen == "auto" else chosen
    limit = settings["max_length"]
    context.report(f"{pooling} pooling" + (f", at most {limit} tokens" if limit else ""))
    return {**settings, "pooling": pooling}


def _prepare_classifier(context: BuildContext) -> Mapping[str, Any]:
    return _prepare(context, CLASSIFIER)


def _prepare(context: BuildContext, kind: ModelKind) -> dict[str, Any]:
    trusts = bool(context.options["trust_remote_code"])
    check_kind(context.source, kind, trust_remote_code=trusts)
    longest, chosen = max_length(context.source), int(context.options["max_length"])
    if longest and chosen > longest:
        raise OptionError(
            f"{context.model} reads at most {longest} tokens, not {chosen}",
            hint="give a smaller max_length",
        )
    return {
        **place_model(context),
        "loader": kind.loader,
        "max_length": chosen or longest,
        "batch_tokens": context.options["batch_tokens"],
    }
