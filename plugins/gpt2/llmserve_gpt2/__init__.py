"""The plugin ``gpt2``: exported graphs behind a sequence-batched ensemble, with a kept cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve.plugin import (
    Batching,
    BuildContext,
    Generator,
    Option,
    Pair,
    Recipe,
    Tensor,
    contract,
    hookimpl,
)

if TYPE_CHECKING:
    from llmserve.plugin import Assembly

STEP_TOKENS = Tensor("step_tokens", "TYPE_INT32")
"""How many tokens a request of a sequence asks for; without it, one."""

_DIRECT_OLDEST = Pair(
    "sequence-direct-oldest",
    "direct=gpt2-onnx:batching=sequence-direct",
    "oldest=gpt2-onnx:batching=sequence-oldest",
)
_INPUTS = (
    contract.MAX_TOKENS,
    contract.STOP_WORDS,
    contract.INCLUDE_STOP,
    contract.INPUT_IDS,
    contract.PROMPT_ONLY,
)
_GENERATOR_OPTIONS = (
    Option("device", "cpu", "Where the graph runs: cpu, cuda (the first GPU) or cuda:N."),
    Option(
        "gather_us",
        400,
        "How long the generator waits for the other sequences of a step, in microseconds.",
        minimum=0,
    ),
    Option(
        "layout",
        "llmserve",
        "tutorial speaks the names of Triton's sequence batcher tutorial: INPUT_TOKENS, resent as "
        "a whole with every step, and NEXT_TOKENS.",
        choices=("llmserve", "tutorial"),
        renamed=(("seed", "tutorial"),),
    ),
)
_BATCHING_OPTIONS = (
    Option(
        "max_batch_size",
        16,
        "Most sequences in a batch; with direct slots the most under way, others wait.",
        minimum=1,
        maximum=4096,
    ),
    Option(
        "idle_seconds",
        60.0,
        "How long a sequence is kept whose client sends nothing.",
        minimum=0.1,
        maximum=86400,
    ),
    Option(
        "queue_delay_us",
        # Clients that were answered together ask again within so long.
        5000,
        "How long a request may wait for those of other sequences, in microseconds.",
        minimum=0,
    ),
    Option(
        "most_tokens",
        16,
        "Most tokens for one request: as long a newcomer may have to wait.",
        minimum=1,
    ),
)


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        _generator("onnx", "ONNX graph", "onnxruntime", ("onnxruntime",)),
        _generator("torchscript", "TorchScript graph", "pytorch_libtorch", ()),
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    shared: dict[str, Any] = {
        "runtime": "llmserve_gpt2.session.driver:SessionDriver",
        "mode": "sequence",
        "inputs": _INPUTS,
        "requires": (),
    }
    return [
        Batching(
            name="sequence-direct",
            summary="Every sequence has a slot of its own in the batch from its start to its end",
            prepare=_prepare_direct,
            options=_BATCHING_OPTIONS,
            **shared,
        ),
        Batching(
            name="sequence-oldest",
            summary="A batch is filled from all sequences under way, the oldest requests first",
            prepare=_prepare_oldest,
            options=(
                *_BATCHING_OPTIONS,
                Option(
                    "candidates",
                    0,
                    "Most sequences under way, others wait; 0 is four for each of a batch.",
                    minimum=0,
                    maximum=65536,
                ),
            ),
            **shared,
        ),
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name=f"gpt2-{form}",
            summary=f"A graph in {kind}, with a kept cache",
            tokenizer="transformers",
            generator=f"graph-{form}",
            batching="sequence-direct",
            formatter="text",
            pairs=(_DIRECT_OLDEST,) if form == "onnx" else (),
        )
        for form, kind in (("onnx", "ONNX"), ("torchscript", "TorchScript"))
    ]


def _generator(form: str, kind: str, backend: str, needed: tuple[str, ...]) -> Generator:
    def assemble(assembly: Assembly) -> None:
        from llmserve_gpt2.build import assemble as wire

        wire(assembly, form, backend)

    return Generator(
        name=f"graph-{form}",
        summary=f"A decoder-only model's {kind} in Triton's backend for it",
        runtime="llmserve_gpt2.session.graph:Graph",
        modes=frozenset({"sequence"}),
        inputs=(*contract.SAMPLING, contract.LOGIT_BIAS, STEP_TOKENS),
        options=_GENERATOR_OPTIONS,
        assemble=assemble,
        requires=("llmserve-gpt2", "torch", "transformers", *needed),
    )


def _prepare_direct(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_gpt2.build import prepare_direct

    return prepare_direct(context)


def _prepare_oldest(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_gpt2.build import prepare_oldest

    return prepare_oldest(context)
