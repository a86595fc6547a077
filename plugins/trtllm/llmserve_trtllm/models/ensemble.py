"""The ensemble: which tensor of which model goes where."""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext
from llmserve.runtime.contract import Tensor
from llmserve_trtllm.models import preprocessing
from llmserve_trtllm.models.common import put_rows
from llmserve_trtllm.models.postprocessing import told
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.tables import client

_TO_ENGINE = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
}
_WIRES = {"OUT_END_ID": "_PREPROCESSOR_END_ID", "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID"}


def wire(
    assembly: Assembly,
    target: Target,
    parts: tuple[BuildContext, BuildContext, BuildContext],
    formatted: Iterable[Tensor],
) -> None:
    """Declare the ensemble's tensors and lead them through its three models."""
    first, engine, last = parts
    has = {row.name for row in target.engine_inputs}
    others = told(target, formatted)
    direct = [row for row in target.straight if row.name in has]
    taken = preprocessing.taken(target)
    ours = {row.name for row in others}
    scores = [row for row in target.scores if row.name not in ours]
    put_rows(
        assembly.context.config,
        [*taken, *direct],
        [*target.answer, *others, *scores],
    )
    made = [row.name for row in preprocessing.made(target)]
    assembly.step(
        first,
        {client.read_name(row.name): row.name for row in taken},
        {name: _wire_of(name) for name in made if _goes_on(name, has)},
    )
    inputs = {_TO_ENGINE[name]: _wire_of(name) for name in made if _TO_ENGINE.get(name) in has}
    inputs |= {
        client.engine_name(row.name): _wire_of(client.made_name(row.name))
        for row in (*target.wishes, *preprocessing.passed_on(target))
    }
    inputs |= {client.engine_name(row.name): row.name for row in direct}
    outputs = {"output_ids": "_TOKENS_BATCH"}
    if not target.is_first:
        outputs["sequence_length"] = "_SEQUENCE_LENGTH"
    assembly.step(engine, inputs, {**outputs, **{row.name: row.name for row in scores}})
    assembly.step(
        last,
        {
            **{row.name: f"_{row.name}" for row in target.write},
            **({} if target.streams else {client.REQUEST.name: _wire_of(client.REQUEST.name)}),
        },
        {"OUTPUT": "text_output", **{row.name.upper(): row.name for row in others}},
    )


def through(assembly: Assembly, part: BuildContext) -> None:
    """Lead the ensemble to the orchestrator alone, which streams what a pipeline cannot.

    Triton refuses an ensemble whose last step gets tensors from a decoupled model and from
    another, so nothing could be remembered from one piece to the next.
    """
    inputs = [tensor.name for tensor in assembly.plan.inputs]
    outputs = [tensor.name for tensor in assembly.plan.formatter.outputs]
    assembly.step(part, {name: name for name in inputs}, {name: name for name in outputs})


def _wire_of(name: str) -> str:
    return _WIRES.get(name, f"_{name}")


def _goes_on(name: str, has: set[str]) -> bool:
    """Whether somebody reads what preprocessing makes: 0.5.0 has no use for words."""
    return name not in _TO_ENGINE or _TO_ENGINE[name] in has
