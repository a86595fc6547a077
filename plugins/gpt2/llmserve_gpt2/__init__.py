"""The plugin ``gpt2``: exported graphs in a sequence-batched ensemble that keeps the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llmserve.plugin import (
    Batching,
    BuildContext,
    Generator,
    ModelSize,
    Needs,
    Option,
    Recipe,
    Tensor,
    Value,
    contract,
    hookimpl,
)

if TYPE_CHECKING:
    from llmserve.plugin import Assembly

STEP_TOKENS = Tensor("step_tokens", "TYPE_INT32")
"""The number of tokens that a request of a sequence asks for; defaults to one."""

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
        "tutorial uses the names of Triton's sequence batcher tutorial: INPUT_TOKENS, the whole "
        "text, resent with every step, and NEXT_TOKENS.",
        choices=("llmserve", "tutorial"),
        renamed=(("seed", "tutorial"),),
    ),
)
_BATCHING_OPTIONS = (
    Option(
        "max_batch_size",
        16,
        "Maximum number of sequences in a batch; with direct slots also of concurrent sequences, "
        "others wait.",
        minimum=1,
        maximum=4096,
    ),
    Option(
        "idle_seconds",
        60.0,
        "How long a sequence is kept after its client's last request.",
        minimum=0.1,
        maximum=86400,
    ),
    Option(
        "queue_delay_us",
        # Clients whose requests were answered together send the next ones within this time.
        5000,
        "How long a request may wait for other sequences' requests, in microseconds.",
        minimum=0,
    ),
    Option(
        "most_tokens",
        16,
        "Maximum number of tokens per request; a new sequence may have to wait that long.",
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
            summary="Every sequence has its own slot in the batch from start to end",
            prepare=_prepare_direct,
            options=_BATCHING_OPTIONS,
            **shared,
        ),
        Batching(
            name="sequence-oldest",
            summary="A batch is filled from all active sequences, oldest requests first",
            prepare=_prepare_oldest,
            options=(
                *_BATCHING_OPTIONS,
                Option(
                    "candidates",
                    0,
                    "Maximum number of concurrent sequences, others wait; 0 is 4 per batch slot.",
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
            summary=f"A graph in {label} that keeps the KV cache",
            tokenizer="transformers",
            generator=f"graph-{form}",
            batching="sequence-direct",
            formatter="text",
        )
        for form, label in (("onnx", "ONNX"), ("torchscript", "TorchScript"))
    ]


def _generator(form: str, label: str, backend: str, packages: tuple[str, ...]) -> Generator:
    def assemble(assembly: Assembly) -> None:
        from llmserve_gpt2.build import assemble as assemble_graph

        assemble_graph(assembly, form, backend)

    return Generator(
        name=f"graph-{form}",
        summary=f"A decoder-only model's {label} in Triton's backend for it",
        runtime="llmserve_gpt2.session.graph:Graph",
        modes=frozenset({"sequence"}),
        inputs=(*contract.SAMPLING, contract.LOGIT_BIAS, STEP_TOKENS),
        options=_GENERATOR_OPTIONS,
        assemble=assemble,
        needs=partial(_needs, form),
        quantised=lambda _: "",
        requires=("llmserve-gpt2", "torch", "transformers", *packages),
    )


_BUILD = 450_000_000
"""What an export takes, whatever the size (measured)."""
MOST_READ = 1 << 30
"""The largest graph in TorchScript that is compared as a file: libtorch reads it as a whole."""
_PROCESSES = {"onnx": 480_000_000, "torchscript": 610_000_000}
"""What Triton, the stages and a graph take without its weights (measured)."""
_COPIES = 3
"""A step has the keys and values of before and after it, and the backend a batch of them."""


def _needs(form: str, size: ModelSize, options: Mapping[str, Value]) -> Needs:
    """Return what a graph takes, which computes in float32, with one whole context."""
    weights = 4 * size.parameters
    is_torchscript = form == "torchscript"
    # ONNX Runtime turns the largest weight, which has a score for each token.
    compared = min(weights, MOST_READ) if is_torchscript else 4 * size.largest
    widened = 0 if size.dtype == "float32" else weights
    return Needs(
        build=_BUILD + compared,
        # TorchScript's own file is rewritten.
        disk=weights * (2 if is_torchscript else 1) + widened,
        reads=size.bytes + widened + weights,
        process=_PROCESSES[form],
        weights=weights,
        cache=_COPIES * 4 * size.cache * size.context,
        on_gpu=options["device"] != "cpu",
        cached=f"a cache of {size.context} tokens",
    )


def _prepare_direct(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_gpt2.build import prepare_direct

    return prepare_direct(context)


def _prepare_oldest(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_gpt2.build import prepare_oldest

    return prepare_oldest(context)
