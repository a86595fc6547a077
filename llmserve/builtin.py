"""The core's own plugin, with the components that several recipes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve.contract.options import CHAT_TEMPLATE_KWARGS, FORMS
from llmserve.contract.tensors import MESSAGES
from llmserve.errors import OptionError
from llmserve.hookspecs import hookimpl
from llmserve.options import Option
from llmserve.roles import Batching, Formatter, Tokenizer, ToolParser

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

DECOUPLED_OPTION = Option(
    "decoupled",
    False,
    "Stream pieces as they are generated, over gRPC streams and /generate_stream; Triton's /infer "
    "then refuses the model.",
)
"""The option of batchings that can send an answer whole or in pieces."""


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
        )
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
        )
    ]


@hookimpl
def llmserve_register_tool_parsers() -> Sequence[ToolParser]:
    from llmserve.client.tools.parsers import PARSERS

    return PARSERS


def _prepare_tokenizer(context: BuildContext) -> Mapping[str, Any]:
    from llmserve.builder.source_files import (
        check_vocabulary,
        has_chat_template,
        tokenizer_files,
    )

    check_vocabulary(context.source, context.report)
    if context.options["chat"] and not has_chat_template(context.source):
        raise OptionError(
            f"{context.model} has no chat template", mend="leave out --chat, or use a chat model"
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
