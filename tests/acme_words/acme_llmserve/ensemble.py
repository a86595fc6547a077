"""How Acme's ensemble is wired, on the machine that builds."""

from __future__ import annotations

from llmserve.plugin import Assembly, Tensor, add_inputs, add_outputs

PROMPT_IDS = Tensor("prompt_ids", "TYPE_INT64", (-1,), optional=False)
LENGTH = Tensor("length", "TYPE_INT32", optional=False)
OUTPUT_IDS = Tensor("output_ids", "TYPE_INT64", (-1,), optional=False)


def assemble(assembly: Assembly) -> None:
    """Text to ids, ids to ids, ids to text."""
    inputs, outputs = assembly.inputs, assembly.outputs
    stages = [
        ("read", "Read", ["tokenizer"], inputs, [PROMPT_IDS, LENGTH]),
        ("echo", "Echo", ["generator", "batching"], [PROMPT_IDS, LENGTH], [OUTPUT_IDS]),
        ("write", "Write", ["tokenizer", "formatter"], [PROMPT_IDS, OUTPUT_IDS], outputs),
    ]
    for suffix, name, roles, taken, given in stages:
        part = assembly.add(suffix, backend="python")
        add_inputs(part.config, taken)
        add_outputs(part.config, given)
        assembly.stage(part, f"acme_llmserve.echo:{name}", roles=roles)
        assembly.step(part, {t.name: t.name for t in taken}, {t.name: t.name for t in given})
