"""Which models are asked their known answers again, and what is told of what they say."""

from __future__ import annotations

from llmserve.contract.live_answer import LiveAnswer
from llmserve.contract.report import State
from llmserve.server.keep.actions import Action, CheckAnswer, ReportFault
from llmserve.server.keep.certificate import LIVE
from llmserve.server.keep.memory import ModelMemory, TritonMemory
from llmserve.server.keep.picture import TritonPicture


def check_answers(triton: TritonMemory, seen: TritonPicture, now: float) -> list[Action]:
    """Hear what models have answered, and ask one of them, if it has nothing to do."""
    if not triton.certifies or seen.is_busy:
        return []
    actions: list[Action] = []
    for checked in seen.checked:
        model = triton.models.get(checked.model)
        if model is not None and model.certificate.hear(checked, now):
            actions.append(_report(triton, model))
    parts = {part for model in triton.models.values() for part in model.parts}
    asked: list[Action] = []
    for model in triton.models.values():
        # Also of one that is asked nothing, as it is not loaded.
        model.certificate.forget_old(now)
        if model.name in parts or model.state is not State.READY or triton.is_changing(model.name):
            continue
        certificate = model.certificate
        # What is not seen counts as work, so that users do not wait for a check.
        seconds = now if seen.is_hidden else _seconds(triton, model, seen)
        certificate.look(now, seconds, seen.of(model.name).load_number)
        # One after the other, so that they do not keep one another from being idle.
        is_free = not any(each.certificate.asked_at is not None for each in triton.models.values())
        if is_free and certificate.is_due(now):
            asked.append(_ask(triton, model, now))
    return [*actions, *asked]


def _ask(triton: TritonMemory, model: ModelMemory, now: float) -> CheckAnswer:
    certificate = model.certificate
    number = certificate.asked(now)
    if number != LIVE:
        return CheckAnswer(triton.number, model.name, number)
    # The answer that showed a fault stays wrong: whether the model is, shows in another one.
    anew = certificate.fault is not None
    return CheckAnswer(triton.number, model.name, number, certificate.live, anew)


def offer_answer(triton: TritonMemory, answer: LiveAnswer, now: float) -> None:
    """Have an answer to a user judged once its model has nothing to do."""
    model = triton.models.get(answer.model)
    if triton.certifies and model is not None and model.state is State.READY:
        model.certificate.offer(answer, now)


def _seconds(triton: TritonMemory, model: ModelMemory, seen: TritonPicture) -> float:
    """Return the time of processors of a model, with Triton's if that runs a part of it."""
    each = [seen.of(name) for name in triton.with_parts(model.name)]
    in_triton = any(one.runs_in_triton and not one.processes for one in each)
    return sum(one.seconds for one in each) + (seen.seconds if in_triton else 0.0)


def _report(triton: TritonMemory, model: ModelMemory) -> ReportFault:
    fault = model.certificate.fault
    said = f"its answers are wrong ({fault.in_words()})" if fault else "its answers are right again"
    triton.lines.append(f"{model.name}: {said}")
    return ReportFault(triton.number, model.name, fault)
