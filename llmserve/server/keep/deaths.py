"""What has ended or failed in one Triton, and what is started again for that."""

from __future__ import annotations

from llmserve.contract.report import State
from llmserve.server.find.launch import POLL
from llmserve.server.keep.actions import Action, Kill, Load, Start, Stop, StopTrying
from llmserve.server.keep.memory import ModelMemory, TritonMemory
from llmserve.server.keep.picture import Canary, Heard, TritonPicture
from llmserve.server.keep.states import Watch
from llmserve.server.workarounds import DEATH_REPORTED

GONE = 2.0
"""Seconds after which a missing folder is not one that a build is replacing."""
RELOAD_BEGINS = 15.0 + POLL
"""Seconds after which a Triton that has not begun to reload a model is stuck."""
_ENDS_WITHIN = 3.0
"""Seconds within which the process of a model that raised an error ends by itself."""


def notice(triton: TritonMemory, seen: TritonPicture, now: float) -> list[Action]:
    """Move the states of a Triton and of its models to what has happened."""
    actions: list[Action] = []
    if seen.start is not None:
        _notice_start(triton, seen, now)
    if seen.is_busy or triton.stays_down or triton.starting:
        return actions
    if seen.ended:
        was_alive = triton.triton.alive
        triton.lost(now, f"Triton ended: {seen.ended}")
        if was_alive:
            _quote(triton, triton.triton, seen)
    elif triton.triton.alive and seen.is_stopped:
        triton.lost(now, "Triton is stopped, by a signal")
    elif triton.triton.alive:
        actions += _notice_models(triton, seen, now)
    for canary in seen.canaries:
        actions += _hear(triton, canary, seen, now)
    return actions


def _notice_start(triton: TritonMemory, seen: TritonPicture, now: float) -> None:
    start, started, triton.starting = seen.start, triton.starting, ()
    # What is unloaded meanwhile is no part of it.
    models = [m for m in triton.models.values() if m.name in started and not m.state.is_down]
    if start is None:
        return
    if start.problem:
        for model in models:
            if why := start.failures.get(model.name):
                model.failed(now, f"it failed to load: {why}")
        if not start.failures:
            _leave_out_new(triton, models, start.problem, now)
        triton.lost(now, start.problem)
        return
    triton.starts += 1
    triton.is_renewable = start.is_renewable
    triton.loading_at = now
    for unload in triton.unloading.values():
        if unload.model in started:
            unload.start = triton.starts
    triton.triton.loaded(now)
    for model in models:
        model.forget_load()
        if why := start.failures.get(model.name):
            model.served = False
            model.failed(now, f"it failed to load: {why}")
        else:
            model.served = True
            model.loaded(now)
            triton.emptied = False


def _leave_out_new(
    triton: TritonMemory, models: list[ModelMemory], problem: str, now: float
) -> None:
    """Start next without what this Triton never had: it may be what ends Triton itself."""
    new = [model for model in models if not model.served]
    if len(new) < len(models) or triton.may_be_empty:
        for model in new:
            model.failed(now, f"Triton does not start with it: {problem}")
            model.cost_restart = True


def _notice_models(triton: TritonMemory, seen: TritonPicture, now: float) -> list[Action]:
    actions: list[Action] = []
    if seen.is_loading:
        triton.loading_at = now
    for name, model_seen in seen.models.items():
        if model_seen.given_up:
            # See workarounds.GIVEN_UP.
            actions.append(Kill(triton.number, name, model_seen.given_up, is_death=True))
    for model in list(triton.models.values()):
        if not triton.triton.alive:
            break
        model_seen = seen.of(model.name)
        if model_seen.died is not None:
            model.died_at, model.how = now, model_seen.died
        if model.state is not State.UNLOADED:
            _check_folder(triton, model, now, has_folder=model_seen.has_folder)
        model.loading_since = (model.loading_since or now) if model_seen.is_loading else None
        if _loads_too_long(triton, model, now):
            actions += _end_load(triton, model, seen, now)
        elif model.alive and model.died_at is not None and _answers_meanwhile(triton, model, seen):
            if not model_seen.is_loading:
                # Triton has reported it, as a load that failed.
                model.died_at = None
            elif now - model.died_at > DEATH_REPORTED:
                _died_loading(
                    triton, model, seen, now, f"its process died while it was loading: {model.how}"
                )
        elif model.alive and model.died_at is not None:
            model.died(now, f"its process has died: {model.how}")
            _quote(triton, model, seen)
            model.died_at = None
        # The process that loads may be another one than that which answers meanwhile.
        elif model.alive and model_seen.is_stopped and not model_seen.is_loading:
            model.died(now, "its process is stopped, by a signal")
            # Triton never would end it, and clients wait for it.
            actions.append(Kill(triton.number, model.name))
        elif model.state is State.LOADING:
            actions += _check_loading(triton, model, seen, now)
    return actions


def _loads_too_long(triton: TritonMemory, model: ModelMemory, now: float) -> bool:
    return model.loading_since is not None and now - model.loading_since > triton.ready_timeout


def _end_load(
    triton: TritonMemory, model: ModelMemory, seen: TritonPicture, now: float
) -> list[Action]:
    """End a load that takes too long: Triton loads nothing else before that.

    Triton reports that it has failed, unless it waits forever for the process that has ended
    (workarounds.DIED_LOADING), or loads the model itself: then it is restarted without the model.
    """
    if model.ended_late is None:
        model.ended_late, processes = now, seen.of(model.name).processes
        answering = _former_processes(triton, model) if model.alive else frozenset[int]()
        if not (model.alive or model.state.is_down):
            model.failed(now, why_late(triton))
        return [
            Kill(triton.number, model.name, processes - answering if answering else None),
            StopTrying(triton.number, model.name, model.served),
        ]
    if now - model.ended_late > DEATH_REPORTED:
        if not model.state.is_down:
            model.failed(now, why_late(triton))
        _restart_without(triton, model, now)
    return []


def why_late(triton: TritonMemory) -> str:
    """Say why a model was not loaded whose load was ended."""
    return f"it was not loaded within {triton.ready_timeout:g} s"


def _restart_without(triton: TritonMemory, model: ModelMemory, now: float) -> None:
    """Restart a Triton that waits forever for a model, on demand once the others are not used."""
    why = f"Triton waits for {model.name}"
    if triton.on_demand:
        # Whoever asks for it has it tried again.
        model.cost_restart = True
        triton.unloading.pop(model.name, None)
        triton.want_restart(now, why)
    else:
        triton.lost(now, why, fault=False)


def _answers_meanwhile(triton: TritonMemory, model: ModelMemory, seen: TritonPicture) -> bool:
    """Return whether the process that has died was another than those that answer until then."""
    of_it, before = seen.of(model.name), _former_processes(triton, model)
    return bool(not of_it.is_loaded and before and before <= of_it.processes)


def _former_processes(triton: TritonMemory, model: ModelMemory) -> frozenset[int]:
    """Return the processes that a model had before the load that is under way."""
    former = (
        load.former_processes.get(model.name, frozenset())
        for load in triton.loading.values()
        if load.start == triton.starts
    )
    return next(filter(None, former), frozenset())


def _check_loading(
    triton: TritonMemory, model: ModelMemory, seen: TritonPicture, now: float
) -> list[Action]:
    loading = seen.of(model.name)
    if loading.is_loaded:
        model.died_at, model.served, model.cost_restart = None, True, False
        model.loaded(now)
        triton.emptied = False
    elif why := loading.not_asked:
        why = f"it cannot be read: {why}"
        # A disk that is full, or a build that replaces the folder, may only be so for a moment.
        (model.died if model.served else model.failed)(now, why)
    elif why := loading.failure:
        if model.served and not loading.is_hopeless:
            model.died(now, f"it failed to load: {why}")
        else:
            model.failed(now, f"it failed to load: {why}")
        return [StopTrying(triton.number, model.name, model.served)]
    elif loading.raised and not model.served:
        # Triton reports that when its process has ended, and loads nothing before.
        model.raised_at = model.raised_at or now
        if now - model.raised_at > _ENDS_WITHIN:
            return [Kill(triton.number, model.name)]
    elif model.died_at is not None and now - model.died_at > DEATH_REPORTED:
        _died_loading(
            triton, model, seen, now, f"its process died while it was loading: {model.how}"
        )
    elif seen.is_stuck and loading.is_loading and now - model.since > DEATH_REPORTED:
        # See workarounds.STUCK_STUB.
        _died_loading(triton, model, seen, now, "its process could not be started")
    elif now - max(model.since, triton.loading_at) > RELOAD_BEGINS:
        if model.served:
            triton.lost(now, f"Triton does not load {model.name}")
        else:
            # A new model is not worth the cost of a restart for the others.
            model.failed(now, "Triton does not begin to load it")
            return [StopTrying(triton.number, model.name, model.served)]
    return []


def _died_loading(
    triton: TritonMemory, model: ModelMemory, seen: TritonPicture, now: float, why: str
) -> None:
    """See workarounds.DIED_LOADING."""
    model.died_at = None
    _quote(triton, model, seen)
    triton.lines.append(f"{model.name}: meanwhile, {seen.resources}")
    if triton.on_demand and not model.served:
        model.failed(now, why)
        _restart_without(triton, model, now)
    else:
        model.died(now, why)
        triton.lost(now, f"Triton waits for {model.name}", fault=False)


def _check_folder(
    triton: TritonMemory, model: ModelMemory, now: float, *, has_folder: bool
) -> None:
    """Report a folder that was deleted or renamed; Triton itself does not notice."""
    if has_folder:
        model.gone_since, model.note = None, ""
    elif model.gone_since is None:
        model.gone_since = now
    elif now - model.gone_since > GONE and not model.note:
        folder = triton.repository / model.name
        model.note = f"{folder} is gone: llmserve unload {model.name}, or build it again"
        model.notify(f"{model.name}: {model.note}")


def _hear(triton: TritonMemory, canary: Canary, seen: TritonPicture, now: float) -> list[Action]:
    """Move the state of what a canary request was sent to."""
    if not canary.model:
        hear(triton.triton, canary, now)
        if triton.triton.state.has_ended:
            triton.lost(now, triton.triton.why)
        return []
    model = triton.models.get(canary.model)
    # If it was loaded again meanwhile, that was about a process that has gone.
    if model is None or canary.load_number not in (-1, seen.of(model.name).load_number):
        return []
    was_alive = model.alive
    hear(model, canary, now)
    if was_alive and not model.alive and canary.heard is Heard.MISSED:
        # Triton never would end what hangs, and clients wait for it.
        return [Kill(triton.number, part) for part in triton.with_parts(model.name)]
    return []


def hear(watch: Watch, canary: Canary, now: float) -> None:
    if canary.heard is Heard.ANSWERED:
        watch.answered(now)
    elif canary.heard is Heard.MISSED:
        watch.missed(now, canary.why)
    elif canary.heard is Heard.WORKS:
        watch.works(now, canary.why)
    elif watch.alive:
        watch.died(now, canary.why)


def _quote(triton: TritonMemory, ended: Watch, seen: TritonPicture) -> None:
    """Report the line of the log that explains what has just ended, if there is one.

    It is no part of the state: clients may see that, and the line may be about a request.
    """
    if seen.last_words:
        triton.lines.append(f"{ended.name}: the log says: {seen.last_words}")


def revive(triton: TritonMemory, seen: TritonPicture, now: float) -> list[Action]:
    """Start again what has ended, once its wait is over."""
    if seen.is_busy or triton.starting:
        return []
    if triton.stays_down:
        is_first, triton.has_stopped = not triton.has_stopped, True
        return [Stop(triton.number)] if is_first else []
    if triton.triton.state is State.RESTARTING:
        return _restart(triton, seen, now) if now >= triton.triton.restart_at else []
    return [
        action
        for model in list(triton.models.values())
        if model.state is State.RESTARTING and now >= model.restart_at and triton.triton.alive
        for action in _reload(triton, model, now)
    ]


def _reload(triton: TritonMemory, model: ModelMemory, now: float) -> list[Action]:
    model.loading(now)
    if not triton.is_renewable:
        triton.lost(now, f"{model.name} is restarted with all others", fault=False)
        return []
    return [ask_to_load(triton, model.name)]


def ask_to_load(triton: TritonMemory, model: str) -> Load:
    """Have Triton load a model and its parts again; the old ones answer meanwhile."""
    names = triton.with_parts(model)
    for name in names:
        if name in triton.models:
            triton.models[name].forget_load()
    return Load(triton.number, names)


def _restart(triton: TritonMemory, seen: TritonPicture, now: float) -> list[Action]:
    triton.triton.loading(now)
    for model in triton.models.values():
        if model.state is not State.UNLOADED and not seen.of(model.name).has_folder:
            # Alone, so that it does not keep the others from starting.
            model.failed(now, f"{triton.repository / model.name} is gone")
    left = [model for model in triton.models.values() if not model.state.is_down]
    if not left and not triton.may_be_empty:
        triton.triton.failed(now, "no model is left that can be loaded")
        return []
    for model in left:
        model.loading(now)
    triton.starting = tuple(model.name for model in left)
    return [Start(triton.number, triton.starting)]
