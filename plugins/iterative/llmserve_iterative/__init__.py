"""The plugin ``iterative``: token-by-token decoding on Triton's iterative scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.plugin import (
    ADAPTER_OPTIONS,
    GUESS_OPTIONS,
    IMAGE_OPTIONS,
    PLACEMENT_OPTIONS,
    STATE_OPTIONS,
    Batching,
    BuildContext,
    Generator,
    ModelSize,
    Needs,
    Option,
    Recipe,
    Value,
    allowed,
    check_causal,
    contract,
    draft_context,
    hookimpl,
    is_for_text,
    lacks_adapter,
    note_unread,
    place_adapters,
    place_model,
    place_needs,
    place_seeing_model,
    sees_images,
    weight_files,
)
from llmserve_iterative.trial import refuse_unserved

# Triton keeps the slot of a cancelled request's sequence until that has been idle for long enough
# (seen on 2.51). So there are many more slots than sequences in flight.
_SEQUENCE_SLOTS = 65_536
_RUNTIME = "llmserve_iterative.generator:StepwiseGenerator"


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    cache_tokens = Option(
        "cache_tokens", 0, "Size of the cache in tokens; 0 means four contexts, or more.", minimum=0
    )
    prefill_chunk = Option("prefill_chunk", 256, "Most prompt tokens per step, in all.", minimum=1)
    return [
        Generator(
            name="stepwise",
            summary="Any decoder-only transformers model, one token per sequence and step",
            runtime=_RUNTIME,
            modes=frozenset({"step", "batch"}),
            prepare=_prepare_generator,
            needs=_needs,
            accepts=refuse_unserved,
            inputs=(*contract.ENGINE_OPTIONS, contract.ADAPTER),
            outputs=contract.ENGINE_OUTPUTS,
            constrains=True,
            options=(
                *PLACEMENT_OPTIONS,
                cache_tokens,
                prefill_chunk,
                *STATE_OPTIONS,
                *GUESS_OPTIONS,
                *ADAPTER_OPTIONS,
                *IMAGE_OPTIONS,
            ),
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    max_batch_size = Option("max_batch_size", 32, "Most sequences in flight at once.", minimum=1)
    idle_seconds = Option(
        "idle_seconds",
        300.0,
        "How long Triton keeps the slot of a sequence whose client disconnected. If steps take "
        "nearly that long, no request can join.",
        minimum=0.001,
        maximum=3600,
    )
    burst_ms = Option(
        "burst_ms",
        8.0,
        "How long steps run in a row before new requests can join; 0 runs single steps and "
        "sends every piece separately.",
        minimum=0,
        maximum=1000,
    )
    layout = Option(
        "layout",
        "llmserve",
        "tutorial is for the client of Triton's tutorial on iterative scheduling, which counts "
        "responses as tokens: the defaults are then stream=true and burst_ms=0.",
        choices=("llmserve", "tutorial"),
        implies=(("tutorial", "stream", True), ("tutorial", "burst_ms", 0.0)),
    )
    return [
        Batching(
            name="iterative",
            summary="New requests join while others are running, by iterative scheduling",
            runtime="llmserve_iterative.driver:IterativeDriver",
            mode="step",
            prepare=_prepare_batching,
            options=(max_batch_size, idle_seconds, burst_ms, layout),
        ),
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="iterative",
            summary="Decoder-only models with in-flight batching",
            generator="stepwise",
            batching="iterative",
            suits={"cpu": 10, "cuda": 10},
        )
    ]


def _prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    options, draft = context.options, draft_context(context)
    placed = _place(context)
    return {
        **placed,
        "adapter_mb": options["adapter_mb"],
        "max_sequences": options.get("max_batch_size") or 32,
        "cache_tokens": options["cache_tokens"],
        "prefill_chunk": options["prefill_chunk"],
        "state_mb": options["state_mb"],
        "prompt_lookup": options["prompt_lookup"],
        "draft": _place_draft(draft) if draft else None,
        "draft_tokens": options["draft_tokens"],
    }


def _place(context: BuildContext) -> Mapping[str, Any]:
    # It imports numpy.
    from llmserve.runtime import embeds_images

    source = context.source
    sees = sees_images(source, causal=True) and not is_for_text(context)
    known = embeds_images(source.config(), wholes=True, grids=True, layers=True, causal=True)
    if sees and known and not lacks_adapter(context):
        refuse_unserved(context)
        return place_seeing_model(context, runtime=_RUNTIME)
    check_causal(source, **allowed(context))
    refuse_unserved(context)
    if sees and not known:
        note_unread(context, "iterative", instead="hf")
    placed = place_model(context)
    place_adapters(context, _RUNTIME, placed)
    return placed


def _place_draft(context: BuildContext) -> Mapping[str, Any]:
    files = weight_files(context.source, pickle=bool(context.options["pickle"]))
    return context.place(files, "draft")


def _prepare_batching(context: BuildContext) -> Mapping[str, Any]:
    """Make Triton reschedule each request until it is done, and pass its sequence's number."""
    from tritonclient.grpc.model_config_pb2 import TYPE_UINT64

    context.streams()
    batching = context.config.sequence_batching
    batching.iterative_sequence = True
    # If the idle time is too short, Triton ends sequences in flight.
    idle_seconds = float(context.options["idle_seconds"])
    batching.max_sequence_idle_microseconds = int(idle_seconds * 1_000_000)
    batching.oldest.max_candidate_sequences = max(_SEQUENCE_SLOTS, context.config.max_batch_size)
    start = batching.control_input.add(name="START").control.add()
    start.kind = start.CONTROL_SEQUENCE_START
    start.bool_false_true.extend([False, True])
    number = batching.control_input.add(name="CORRID").control.add()
    number.kind = number.CONTROL_SEQUENCE_CORRID
    number.data_type = TYPE_UINT64
    return {"burst_ms": context.options["burst_ms"], "idle_seconds": idle_seconds}


def cache_tokens(context: int, sequences: int) -> int:
    """Return how many tokens the cache is for if the build does not say."""
    return max(4 * context, sequences * context // 4)


def _needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    """Return what it takes: on a GPU the whole cache, on a CPU what one context needs of it."""
    context = size.context or 2048
    sequences = int(options.get("max_batch_size") or 32)
    tokens = int(options["cache_tokens"]) or cache_tokens(context, sequences)
    needs = place_needs(size, options)
    if not needs.on_gpu:
        tokens = min(tokens, context)
    copies = int(options["state_mb"]) * 1_000_000
    needs = place_needs(size, options, tokens=tokens, sequences=sequences, copies=copies)
    smaller = tuple({"cache_tokens": each} for each in (65536, 16384, 4096) if each < tokens)
    if not size.cache:
        smaller = ()
    return replace(
        needs,
        instead=(*_fewer(size, sequences), *smaller[:-1], *needs.instead, *smaller[-1:]),
    )


def _fewer(size: ModelSize, sequences: int) -> Sequence[Mapping[str, Value]]:
    """Return numbers of sequences whose states take less memory."""
    return [{"max_batch_size": each} for each in (8, 1) if size.state and each < sequences]
