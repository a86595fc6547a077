"""What users order of a ``serve`` that has all of its models loaded: to load and to unload one."""

from __future__ import annotations

from llmserve.errors import LLMServeError, ServerError
from llmserve.names import near
from llmserve.server.keep.actions import Action, Fulfil, Refuse
from llmserve.server.keep.desired import Desired, Order
from llmserve.server.keep.load_and_unload import begin_load, begin_unload
from llmserve.server.keep.memory import Memory, OrderMemory, TritonMemory
from llmserve.server.keep.picture import Picture


def carry_out(desired: Desired, picture: Picture, memory: Memory) -> list[Action]:
    """Go on with the first order: one change at a time, and in one replica after another."""
    actions: list[Action] = []
    if memory.order is None or memory.order.order not in desired.orders:
        # Whoever gave an order may have gone; what it has begun goes on.
        serving = [triton.number for triton in memory.tritons if not triton.stays_down]
        memory.order = OrderMemory(desired.orders[0], serving) if desired.orders else None
    if (order := memory.order) is None:
        return actions
    while order.left:
        triton = memory.tritons[order.left[0]]
        name = order.order.model
        if triton.stays_down:
            # The others go on, with the same models.
            order.left, order.has_begun = order.left[1:], False
            continue
        if triton.is_changing(name):
            return actions
        if not order.has_begun:
            if refusal := _why_not(triton, order.order):
                return _refuse(memory, refusal)
            order.has_begun = True
            if order.order.do == "unload":
                begin_unload(triton, name, picture.now)
            else:
                seen, parts = picture.tritons[triton.number], order.order.parts
                actions += begin_load(triton, seen, name, parts, picture.now)
            return actions
        model = triton.models.get(name)
        if model is not None and order.order.do != "unload" and (why := model.refused):
            hint = "its previous version, if any, keeps running"
            error = ServerError(f"model {name!r} failed to load: {why}", hint=hint)
            return [*actions, *_refuse(memory, error)]
        order.left, order.has_begun = order.left[1:], False
    if all(triton.stays_down for triton in memory.tritons):
        error = ServerError("Triton has ended", hint="see `llmserve status`")
        return [*actions, *_refuse(memory, error)]
    memory.order = None
    return [*actions, Fulfil(order.order)]


def _refuse(memory: Memory, error: LLMServeError) -> list[Action]:
    order, memory.order = memory.order, None
    return [Refuse(order.order, error)] if order is not None else []


def _why_not(triton: TritonMemory, order: Order) -> LLMServeError | None:
    """Return why an order cannot be carried out by this Triton."""
    if order.do == "unload":
        if order.model not in triton.models:
            hint = near(order.model, triton.models)
            return ServerError(f"no model {order.model!r} is served", hint=hint)
        for owner in triton.models.values():
            if order.model in owner.parts:
                words = f"{order.model} is a part of {owner.name}"
                return ServerError(words, hint=f"unload {owner.name}")
    if not triton.is_renewable:
        unload = order.do == "unload"
        return ServerError(
            f"this Triton cannot {'unload' if unload else 'reload'} a model",
            hint="stop it" if unload else "stop and start it",
        )
    if not triton.triton.alive:
        return ServerError("Triton is restarting", hint="wait until it is ready")
    return None
