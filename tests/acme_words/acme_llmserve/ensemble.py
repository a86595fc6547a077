"""Wires Acme's ensemble together at build time."""

from __future__ import annotations

from llmserve.plugin import Assembly, Tensor, add_inputs, add_outputs

PROMPT_IDS = Tensor("prompt_ids", "TYPE_INT64", (-1,), optional=False)
LENGTH = Tensor("length", "TYPE_INT32", optional=False)
OUTPUT_IDS = Tensor("output_ids", "TYPE_INT64", (-1,), optional=False)


def assemble(assembly: Assembly) -> None:
    """Text to ids, ids to ids, ids to text."""
    stages = [
        ("read", "Read", ["tokenizer"], assembly.inputs, [PROMPT_IDS, LENGTH]),
        ("echo", "Echo", ["generator", "batching"], [PROMPT_IDS, LENGTH], [OUTPUT_IDS]),
        ("write", "Write", ["tokenizer", "formatter"], [PROMPT_IDS, OUTPUT_IDS], assembly.outputs),
    ]
    for suffix, name, roles, inputs, outputs in stages:
        part = assembly.add(suffix, backend="python")
        add_inputs(part.config, inputs)
        add_outputs(part.config, outputs)
        assembly.stage(part, f"acme_llmserve.echo:{name}", roles=roles)
        assembly.step(part, {t.name: t.name for t in inputs}, {t.name: t.name for t in outputs})
