"""What an ensemble's wiring must agree on with the models it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmserve.check.problem import Problem
from llmserve.modelconfig import ModelConfig


def check_ensemble(
    model: str, config: ModelConfig, configs: Mapping[str, ModelConfig], names: set[str]
) -> Iterator[Problem]:
    """Follow every tensor of an ensemble from where it comes to where it goes.

    ``configs`` are those that could be read, ``names`` all models there are.
    """
    if config.platform != "ensemble":
        return
    types = {tensor.name: tensor.data_type for tensor in config.input}
    read: set[str] = set()
    for step in config.ensemble_scheduling.step:
        if step.model_name not in names:
            yield Problem(
                model,
                f"its step {step.model_name} is no model of this repository",
                f"build {step.model_name} too, or name another model",
            )
        part = configs.get(step.model_name)
        read.update(step.input_map.values())
        yield from _check_step(model, step, part)
        outputs = {tensor.name: tensor.data_type for tensor in part.output} if part else {}
        types.update({ours: outputs.get(theirs) for theirs, ours in step.output_map.items()})
    for name in sorted(read - types.keys()):
        yield Problem(model, f"nothing makes the tensor {name}", "map an output to it")
    for tensor in config.input:
        if tensor.name not in read:
            yield Problem(
                model, f"its input {tensor.name} goes nowhere", "map it to a step, or remove it"
            )
    for tensor in config.output:
        if tensor.name not in types:
            yield Problem(
                model, f"its output {tensor.name} comes from nowhere", "map a step's output to it"
            )
        elif types[tensor.name] not in (None, tensor.data_type):
            yield Problem(
                model,
                f"its output {tensor.name} has another data_type than the step's",
                "give both the same",
            )


def _check_step(model: str, step: ModelConfig, part: ModelConfig | None) -> Iterator[Problem]:
    if part is None:
        return
    inputs = {tensor.name: tensor.optional for tensor in part.input}
    outputs = {tensor.name for tensor in part.output}
    for name in sorted(step.input_map.keys() - inputs.keys()):
        yield Problem(model, f"{step.model_name} has no input {name}", "mend the input_map")
    for name in sorted(step.output_map.keys() - outputs):
        yield Problem(model, f"{step.model_name} has no output {name}", "mend the output_map")
    for name, optional in inputs.items():
        if not optional and name not in step.input_map:
            yield Problem(model, f"{step.model_name} needs its input {name}", "map a tensor to it")
