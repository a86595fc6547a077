"""How a model is loaded into one Triton, and how it is unloaded: the one way for each.

Both take several pictures. Triton may end meanwhile: the next one has from its start what
is loaded, and is started without what is unloaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.contract.report import State
from llmserve.server.keep.actions import Action, Drop, Kill, StopTrying
from llmserve.server.keep.deaths import RELOAD_BEGINS, ask_to_load, why_late
from llmserve.server.keep.memory import LoadUnderWay, Stage, TritonMemory, UnloadUnderWay
from llmserve.server.keep.picture import TritonPicture
from llmserve.server.run.activity import BUSY

_IDLE_SECONDS, _IDLE_WITHIN = 0.3, 12.0
"""For how long a model must not compute before it is unloaded, and how long that is waited for."""
_UNLOAD_BEGINS = 60.0
"""Seconds after which a Triton that loads nothing and has not unloaded a model is stuck."""
_LINGERS, _LINGERS_UNSEEN = 10.0, 60.0
"""Seconds after which a process of an unloaded model that does nothing is not needed any more; it
may wait for what Triton itself computes, which only shows when that is done."""
_FORMER_NEEDED = 60.0
"""Seconds after which an old process, which a new one has replaced, answers nothing any more."""
_TRIES = 3
"""How often a load is tried whose process did not respond to Triton for a second."""


def begin_load(
    triton: TritonMemory,
    seen: TritonPicture,
    name: str,
    parts: Iterable[str],
    now: float,
    tries: int = 1,
) -> list[Action]:
    """Have a model loaded, or loaded again; the old one answers until the new one is loaded."""
    names = (*parts, name)
    former = [part for part in triton.own_parts(name) if part not in names]
    for each in names:
        if each not in triton.models:
            triton.add(each, State.LOADING, now)
    model = triton.models[name]
    model.parts, model.former, model.refused = names[:-1], tuple(former), ""
    if model.alive:
        # Its clients did not ask for that.
        triton.lines.append(f"{name}: is loaded again, as a user asks")
    load = triton.loading[name] = LoadUnderWay(
        names, now, triton.starts, former=tuple(former), tries=tries, was_served=model.served,
        former_processes={each: seen.of(each).processes for each in names},
    )  # fmt: skip
    for each in names:
        triton.models[each].load_requested(now)
    for unload in triton.unloading.values():
        # A part that is not dropped yet is needed again.
        unload.names = (
            unload.model,
            *(n for n in unload.names[1:] if n in unload.dropped or n not in names),
        )
    # One that is to be restarted loads it then; one that is being restarted is asked afterwards.
    load.is_asked = triton.triton.alive
    return [ask_to_load(triton, name)] if load.is_asked else []


def begin_unload(triton: TritonMemory, name: str, now: float) -> None:
    """Have a model unloaded, and the parts that no other one has.

    From now on, it gets no canaries, and a Triton that is restarted does not load it.
    """
    names = (name, *triton.own_parts(name))
    triton.loading.pop(name, None)
    for part in names[1:]:
        triton.models.pop(part, None)
    # One on demand stays on offer; requests of others than its holders may be about to end.
    stage = Stage.IDLE if triton.on_demand else Stage.SETTLED
    if triton.on_demand:
        if triton.models[name].state is not State.FAILED:
            triton.models[name].unloaded(now)
        triton.models[name].served = False
    else:
        triton.models.pop(name)
        triton.emptied = all(m.state is State.FAILED for m in triton.models.values())
    triton.unloading[name] = UnloadUnderWay(names, now, triton.starts, stage)


def follow(triton: TritonMemory, seen: TritonPicture, now: float) -> list[Action]:
    """Go on with what is loaded and unloaded."""
    if triton.stays_down:
        for name in triton.loading:
            triton.models[name].refused = "Triton has ended"
        triton.loading.clear()
        triton.unloading.clear()
        return []
    if seen.is_busy or triton.starting or not triton.triton.alive:
        return []
    actions: list[Action] = []
    for loading in list(triton.loading.values()):
        actions += _follow_load(triton, loading, seen, now)
    for unloading in list(triton.unloading.values()):
        if triton.triton.alive:
            actions += _follow_unload(triton, unloading, seen, now)
    return actions


# Loading


def _follow_load(
    triton: TritonMemory, load: LoadUnderWay, seen: TritonPicture, now: float
) -> list[Action]:
    model = triton.models[load.model]
    if not (load.is_asked or model.alive or model.state is State.FAILED):
        load.is_asked, load.start, load.since = True, triton.starts, now
        return [ask_to_load(triton, load.model)]
    if why := _why_it_failed(triton, load, seen):
        return _fail(triton, load, seen, why, now)
    # A Triton that was restarted meanwhile has loaded it.
    is_loaded = load.start != triton.starts or all(seen.of(name).is_loaded for name in load.names)
    if model.alive and not is_loaded:
        if now - max(load.since, triton.loading_at) > RELOAD_BEGINS:
            triton.lost(now, f"Triton does not load {load.model}")
        elif seen.is_stuck and any(seen.of(name).is_loading for name in load.names):
            # See workarounds.STUCK_STUB.
            triton.lost(now, f"Triton waits for {load.model}", fault=False)
    if not (is_loaded and model.alive):
        return []
    load.loaded_at = load.loaded_at or now
    # The log says a moment earlier that a model is loaded than it takes requests.
    asked = seen.of(load.model)
    if not asked.takes_requests or asked.asked_at < load.loaded_at:
        return []
    return _finish_load(triton, load, seen, now)


def _why_it_failed(triton: TritonMemory, load: LoadUnderWay, seen: TritonPicture) -> str:
    for name in load.names:
        model, of_it = triton.models[name], seen.of(name)
        if load.start == triton.starts and (why := of_it.not_asked or of_it.failure):
            why = why if model.ended_late is None else why_late(triton)
            return why if name == load.model else f"its part {name} failed to load: {why}"
        if model.state is State.FAILED:
            return model.why
    return ""


def _fail(
    triton: TritonMemory, load: LoadUnderWay, seen: TritonPicture, why: str, now: float
) -> list[Action]:
    """Have nothing of a model that failed to load take memory; an earlier build of it stays."""
    name, model, actions = load.model, triton.models[load.model], list[Action]()
    del triton.loading[name]
    if load.was_served and not triton.on_demand:
        model.refused = why
        triton.lines.append(f"{name}: failed to load again, and runs as before: {why}")
        for each in load.names:
            part = triton.models[each]
            # Whoever ends one that takes too long has done that.
            if part.alive and part.ended_late is None and seen.of(each).failure:
                actions.append(StopTrying(triton.number, each, loaded_before=True))
        return actions
    did_not_respond = any(
        seen.of(each).is_unhealthy and triton.models[each].ended_late is None for each in load.names
    )
    again = did_not_respond and load.tries < _TRIES
    if model.state is not State.FAILED:
        model.failed(now, why)
        actions.append(StopTrying(triton.number, name, loaded_before=False))
    own = {part: triton.models.pop(part, None) for part in triton.own_parts(name)}
    parts = [part for part, state in own.items() if state and state.state is not State.FAILED]
    if triton.restart_wanted is not None:
        # It is restarted without it.
        model.refused = why
        return actions
    if again:
        # It is not the model's fault if the machine has too much to do (GIVEN_UP).
        triton.lines.append(f"{name}: is loaded again, since it did not respond")
    else:
        model.refused = why
    triton.unloading[name] = UnloadUnderWay(
        (name, *parts), now, triton.starts, again=model.parts if again else None,
        tries=load.tries + 1, quiet=True, dropped=(name,), dropped_at=now,
    )  # fmt: skip
    return actions


def _finish_load(
    triton: TritonMemory, load: LoadUnderWay, seen: TritonPicture, now: float
) -> list[Action]:
    model = triton.models[load.model]
    if load.former and load.start == triton.starts:
        # Its old processes may still send requests to what it does not have any more.
        before = load.former_processes[load.model]
        is_needed = not before.isdisjoint(seen.of(load.model).processes)
        model.former = ()
        for part in load.former:
            # A Triton that is restarted meanwhile does not load them.
            triton.models.pop(part, None)
        if is_needed and now - load.since < _FORMER_NEEDED:
            return []
        triton.unloading[load.former[0]] = UnloadUnderWay(
            load.former, now, triton.starts, quiet=True
        )
    del triton.loading[load.model]
    return []


# Unloading


def _follow_unload(
    triton: TritonMemory, unload: UnloadUnderWay, seen: TritonPicture, now: float
) -> list[Action]:
    if unload.start != triton.starts:
        # Another Triton was started without it.
        return _finish_unload(triton, unload, seen, now)
    if unload.stage is Stage.IDLE and _is_idle(unload, seen, now):
        unload.stage = Stage.SETTLED
    # Its files must stay while it is being loaded (workarounds.FILES_GONE).
    if unload.stage is Stage.SETTLED and not any(seen.of(n).is_loading for n in unload.names):
        return _drop(triton, unload, seen, now)
    if unload.stage is Stage.SETTLED and now - unload.since > triton.ready_timeout:
        triton.lost(now, f"Triton waits for {unload.model}", fault=False)
    if unload.stage is Stage.GONE:
        _check_whether_gone(triton, unload, seen, now)
    if unload.stage is Stage.ENDED:
        return _check_whether_ended(triton, unload, seen, now)
    return []


def _is_idle(unload: UnloadUnderWay, seen: TritonPicture, now: float) -> bool:
    """See workarounds.UNLOADED_AT_WORK: requests of others may be about to end as well."""
    if now - unload.since > _IDLE_WITHIN:
        return True
    if unload.measured_at and now - unload.measured_at < _IDLE_SECONDS:
        return False
    took, is_first = now - unload.measured_at, not unload.measured_at
    seconds, answers = unload.seconds, unload.answers
    _measure(unload, seen, now)
    is_busy = unload.seconds - seconds > BUSY * took or unload.answers != answers
    is_asked = any(seen.of(name).is_asked_for_token for name in unload.names)
    return not (is_first or is_busy or is_asked)


def _measure(unload: UnloadUnderWay, seen: TritonPicture, now: float) -> bool:
    """Note what models have done so far, and return whether that is another amount."""
    done = (
        sum(seen.of(name).seconds for name in unload.names),
        tuple(seen.of(name).answers for name in unload.names),
    )
    changed = done != (unload.seconds, unload.answers)
    unload.measured_at, (unload.seconds, unload.answers) = now, done
    return changed


def _drop(
    triton: TritonMemory, unload: UnloadUnderWay, seen: TritonPicture, now: float
) -> list[Action]:
    names = unload.left
    if len(names) > 1 and names[0] == unload.model and seen.of(unload.model).processes:
        # One that calls its parts itself may do so until it has answered its last request.
        names = names[:1]
    unload.dropped, unload.dropped_at = (*unload.dropped, *names), now
    unload.stage = Stage.GONE
    return [Drop(triton.number, names)] if names else []


def _check_whether_gone(
    triton: TritonMemory, unload: UnloadUnderWay, seen: TritonPicture, now: float
) -> None:
    """Go on when Triton does not send requests to models any more."""
    asked = [seen.of(name) for name in unload.dropped]
    if all(one.takes_requests is False and one.asked_at > unload.dropped_at for one in asked):
        unload.stage = Stage.ENDED
        _measure(unload, seen, now)
    elif seen.is_stuck:
        # See workarounds.STUCK_STUB.
        triton.lost(now, f"Triton waits for {unload.model}", fault=False)
    # Triton begins with nothing else while it loads, or for a configuration that it cannot read
    # (workarounds.UNREADABLE).
    elif now - max(unload.dropped_at, triton.loading_at) > _UNLOAD_BEGINS:
        triton.lost(now, f"Triton does not unload {unload.model}")


def _check_whether_ended(
    triton: TritonMemory, unload: UnloadUnderWay, seen: TritonPicture, now: float
) -> list[Action]:
    """Go on when the processes have ended, or end those that never would (NEVER_ENDED)."""
    if not any(seen.of(name).processes for name in unload.dropped):
        if unload.left:
            unload.stage = Stage.SETTLED
            return []
        return _finish_unload(triton, unload, seen, now)
    since = unload.measured_at
    if _measure(unload, seen, now):
        return []
    unload.measured_at = since
    unseen = any(seen.of(n).runs_in_triton and not seen.of(n).processes for n in unload.names)
    if now - since <= (_LINGERS_UNSEEN if unseen else _LINGERS):
        return []
    unload.measured_at = now
    triton.lines.append(f"{unload.model}: its processes are ended, which did not end by themselves")
    return [Kill(triton.number, name) for name in unload.dropped]


def _finish_unload(
    triton: TritonMemory, unload: UnloadUnderWay, seen: TritonPicture, now: float
) -> list[Action]:
    if any(seen.of(name).is_being_withdrawn for name in unload.names):
        return []
    del triton.unloading[unload.model]
    if unload.again is not None:
        return begin_load(triton, seen, unload.model, unload.again, now, unload.tries)
    if not unload.quiet:
        triton.lines.append(f"{unload.model}: unloaded")
    return []
