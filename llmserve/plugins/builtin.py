"""The core's own plugin, with the components that several recipes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmserve.contract.options import CHAT_TEMPLATE_KWARGS, FORMS, READING, VECTOR
from llmserve.contract.tasks import CLASSIFY, EMBED, RERANK
from llmserve.contract.tensors import (
    EMBEDDING,
    INPUT_TOKENS,
    LABEL,
    MESSAGES,
    PROBABILITY,
    SCORE,
    TEXT_PAIR,
)
from llmserve.errors import OptionError
from llmserve.plugins.hookspecs import hookimpl
from llmserve.plugins.options import Option
from llmserve.plugins.roles import Batching, Formatter, Tokenizer, ToolParser

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

DECOUPLED_OPTION = Option(
    "decoupled",
    False,
    "Stream pieces as they are generated, over gRPC streams and /generate_stream; Triton's /infer "
    "then refuses the model.",
)
"""The option of batchings that can send an answer whole or in pieces."""

_NORMALIZE = Option(
    "normalize",
    "auto",
    "Whether embeddings have the length 1; auto is what the model's modules.json says.",
    choices=("auto", "true", "false"),
)
_DIMENSIONS = Option(
    "dimensions",
    0,
    "Keep only the first N numbers of each embedding, of models that were trained for it; 0 keeps "
    "all.",
    minimum=0,
)
_ACTIVATION = Option(
    "activation",
    "auto",
    "What makes a score of a single logit; auto is what the model's files say, else sigmoid.",
    choices=("auto", "sigmoid", "none"),
)
_LABELS = Option(
    "labels",
    "auto",
    "Whether a text has one of the labels or several; auto is what the model's config.json says.",
    choices=("auto", "one", "several"),
)


@hookimpl
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:
    return [
        Tokenizer(
            name="transformers",
            summary="The model's own tokenizer, as AutoTokenizer loads it",
            runtime="llmserve.runtime:TransformersTokenizer",
            prepare=_prepare_tokenizer,
            inputs=(MESSAGES, CHAT_TEMPLATE_KWARGS),
            requires=("transformers",),
        ),
        Tokenizer(
            name="encoder",
            summary="The model's own tokenizer for texts and pairs of them, which it can cut",
            runtime="llmserve.runtime:TransformersTokenizer",
            prepare=_prepare_encoder_tokenizer,
            inputs=READING,
            requires=("transformers",),
        ),
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    return [
        Batching(
            name="dynamic",
            summary="Batches waiting requests; each keeps its own parameters",
            runtime="llmserve.runtime:BatchDriver",
            requires=(),
            prepare=_prepare_dynamic,
            options=(
                Option(
                    "max_batch_size",
                    8,
                    "Maximum prompts per batch; 0 builds a model without a batch dimension.",
                    minimum=0,
                ),
                Option(
                    "queue_delay_us",
                    0,
                    "How long a request may wait for others to batch with, in microseconds.",
                    minimum=0,
                ),
                DECOUPLED_OPTION,
            ),
        ),
        Batching(
            name="static",
            summary="Starts the next batch when the last request of the current one is done",
            runtime="llmserve.runtime:BatchDriver",
            requires=(),
            prepare=_prepare_streaming,
            options=(
                Option(
                    "max_batch_size",
                    32,
                    "Maximum sequences in flight; others wait.",
                    minimum=1,
                ),
            ),
        ),
        Batching(
            name="continuous",
            summary="A thread runs steps continuously; requests join between steps",
            runtime="llmserve.runtime:ContinuousDriver",
            requires=(),
            mode="step",
            prepare=_prepare_streaming,
            options=(Option("max_batch_size", 32, "Maximum prompts per request.", minimum=1),),
        ),
    ]


@hookimpl
def llmserve_register_formatters() -> Sequence[Formatter]:
    return [
        Formatter(
            name="text",
            summary="text_output with its finish reason and token counts",
            runtime="llmserve.runtime:TextFormatter",
            extra_inputs=FORMS,
            requires=(),
            constrains_with=("llguidance",),
        ),
        Formatter(
            name="embedding",
            summary="embedding: a vector for each text",
            runtime="llmserve.runtime:EmbeddingFormatter",
            answers="vector",
            task=EMBED,
            prepare=_prepare_embedding,
            inputs=VECTOR,
            outputs=(EMBEDDING, INPUT_TOKENS),
            options=(_NORMALIZE, _DIMENSIONS),
            requires=("numpy",),
        ),
        Formatter(
            name="scores",
            summary="score: how well text_pair answers text_input",
            runtime="llmserve.runtime:ScoreFormatter",
            answers="logits",
            task=RERANK,
            prepare=_prepare_scores,
            inputs=(replace(TEXT_PAIR, optional=False),),
            outputs=(SCORE, INPUT_TOKENS),
            options=(_ACTIVATION,),
            requires=("numpy",),
        ),
        Formatter(
            name="labels",
            summary="label and probability: all labels of a text, the likeliest first",
            runtime="llmserve.runtime:LabelFormatter",
            answers="logits",
            task=CLASSIFY,
            prepare=_prepare_labels,
            inputs=(TEXT_PAIR,),
            outputs=(LABEL, PROBABILITY, INPUT_TOKENS),
            options=(_LABELS,),
            requires=("numpy",),
        ),
    ]


@hookimpl
def llmserve_register_tool_parsers() -> Sequence[ToolParser]:
    from llmserve.client.tools.parsers import PARSERS

    return PARSERS


def _prepare_tokenizer(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.source_files import (
        check_chat_template,
        check_vocabulary,
        has_chat_template,
        tokenizer_files,
    )

    check_vocabulary(context.source, context.report)
    check_chat_template(context.source)
    if context.options.get("chat") and not has_chat_template(context.source):
        raise OptionError(
            f"{context.model} has no chat template", hint="leave out --chat, or use a chat model"
        )
    return context.place(tokenizer_files(context.source), "tokenizer")


def _prepare_dynamic(context: BuildContext) -> Mapping[str, Any]:
    if context.config.max_batch_size:
        delay = int(context.options["queue_delay_us"])
        context.config.dynamic_batching.max_queue_delay_microseconds = delay
    if context.options["decoupled"]:
        context.streams()
    return {}


def _prepare_streaming(context: BuildContext) -> Mapping[str, Any]:
    context.streams()
    context.config.dynamic_batching.SetInParent()
    return {}


def _prepare_encoder_tokenizer(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.encoders import prepare_encoder_tokenizer

    return prepare_encoder_tokenizer(context)


def _prepare_embedding(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.encoders import prepare_embedding

    return prepare_embedding(context)


def _prepare_scores(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.encoders import prepare_scores

    return prepare_scores(context)


def _prepare_labels(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.encoders import prepare_labels

    return prepare_labels(context)
