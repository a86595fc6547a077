"""Which models are to read their warm prompts, and what is told of what came of that."""

from __future__ import annotations

from llmserve.contract.report import State
from llmserve.server.keep.actions import Action, ReadAhead
from llmserve.server.keep.memory import TritonMemory
from llmserve.server.keep.picture import HasRead, TritonPicture


def read_ahead(triton: TritonMemory, seen: TritonPicture) -> list[Action]:
    """Hear which models have read, and ask those that have not since they were loaded."""
    if seen.is_busy:
        return []
    for heard in seen.has_read:
        _hear(triton, heard)
    asked: list[Action] = []
    for name in sorted(triton.warm & triton.models.keys()):
        model, load_number = triton.models[name], seen.of(name).load_number
        if model.state is not State.READY or triton.is_changing(name):
            continue
        if model.to_read != load_number:
            model.to_read = load_number
            asked.append(ReadAhead(triton.number, name))
    return asked


def is_reading(triton: TritonMemory, name: str, load_number: int) -> bool:
    """Return whether this load of a model answers, but has not read its warm prompts yet."""
    model = triton.models[name]
    return name in triton.warm and model.alive and model.has_read != load_number


def _hear(triton: TritonMemory, heard: HasRead) -> None:
    model = triton.models.get(heard.model)
    if model is None or heard.load_number != model.to_read:
        # It is asked again, as the process that was asked has gone.
        return
    # One that cannot read them is not asked again, as it would fail again; it answers all the same.
    model.has_read = heard.load_number
    if not model.alive:
        return
    for problem in heard.problems:
        triton.lines.append(f"{model.name}: a prompt was not read ahead: {problem}")
    if heard.tokens:
        triton.lines.append(
            f"{model.name}: has read {heard.tokens:,} tokens of prompts in {heard.took:.1f} s"
        )
