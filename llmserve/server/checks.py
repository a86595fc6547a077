"""What keeps a server from starting here, found before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmserve.contract.serve_options import Runtime
from llmserve.errors import LLMServeError, ServerError, UsageError
from llmserve.names import near
from llmserve.packages import install_command
from llmserve.problems import Problem
from llmserve.repository.repository import Repository
from llmserve.server.find.embedded import find_embedded, missing_backends
from llmserve.server.find.launch import find_binary, find_docker
from llmserve.server.keep.desired import OnDemand
from llmserve.server.run.machine import note_of_guesses, note_of_memory, shortages
from llmserve.server.settings import ServerSettings, port_problems
from llmserve.server.tracing import traces_url

_FIND = {"binary": find_binary, "embedded": find_embedded, "docker": find_docker}


@dataclass(frozen=True)
class CheckedSettings:
    """The settings with which a server starts, and why it cannot."""

    settings: ServerSettings
    left_out: Mapping[str, str]
    """The models that cannot be served, and why; the settings are without them."""
    problems: list[Problem]
    """What prevents the start; empty if nothing does."""


def check_settings(
    settings: ServerSettings,
    on_demand: OnDemand | None = None,
    *,
    notify: Callable[[str], None] = lambda _: None,
) -> CheckedSettings:
    """Complete settings for what is here, and find all that would prevent a start, at once.

    A server that loads models ``on_demand`` starts with those that are pinned. ``notify`` is told
    what prevents nothing, but should be known.
    """
    problems: list[Problem] = []
    if settings.runtime == "auto":
        try:
            settings = replace(settings, runtime=first_available())
        except LLMServeError as error:
            problems.append(Problem.of(error))
    left_out: dict[str, str] = {}
    is_there = settings.repository.is_dir()
    if is_there:
        settings = _with_image(settings, notify)
        settings, left_out, of_models = _without_broken(settings, notify)
        problems += of_models
        for name, why in left_out.items():
            notify(f"{name} is left out: {why}")
        if on_demand:
            # Before its models are those that are loaded at the start.
            if refused := check_runtime(settings, settings.opened):
                problems.append(Problem.of(refused))
            if note := note_of_guesses(settings):
                notify(f"note: {note}")
            settings = at_start(settings, settings.opened, on_demand)
    problems += find_problems(settings)
    if is_there and (note := note_of_memory(settings)):
        notify(f"note: {note}")
    return CheckedSettings(settings, left_out, [*problems, *port_problems(settings)])


def _with_image(settings: ServerSettings, notify: Callable[[str], None]) -> ServerSettings:
    """Choose the container's image, and drop the models that need another image."""
    if settings.runtime != "docker":
        return settings
    from llmserve.repository.dockerfile import image_for

    image = image_for(settings.opened, settings.models)
    if image.models != settings.models:
        notify(f"the image {image.name} serves only {', '.join(image.models)}")
    return replace(settings, image=image.name, models=image.models)


def _without_broken(
    settings: ServerSettings, notify: Callable[[str], None]
) -> tuple[ServerSettings, dict[str, str], list[Problem]]:
    """Leave out the models that cannot be loaded, if any is left; else return the problems.

    Problems that do not prevent a model from loading are told.
    """
    from llmserve.repository.check import check_repository

    here, repository = settings.runtime == "embedded", settings.opened
    problems = check_repository(repository, models=settings.models, quick=True, served_here=here)
    for problem in problems:
        if not problem.fatal:
            notify(f"note: {problem}")
    fatal = [problem for problem in problems if problem.fatal]
    existing = repository.models
    names = [name for name in settings.models or existing if name in existing]
    # The first of a model says why; one without a backend here is found by the server as well.
    here_too = missing_backends(settings) if here else []
    broken = {p.where: str(replace(p, where="")) for p in reversed([*fatal, *here_too])}
    left_out = with_dependents(repository, broken)
    rest = tuple(name for name in names if name not in left_out)
    if not left_out or not rest or not left_out.keys() <= existing.keys():
        return settings, {}, fatal
    left_out = {name: left_out[name] for name in names if name in left_out}
    return replace(settings, models=rest), left_out, []


def first_available() -> Runtime:
    """Return the runtime that ``auto`` selects; raise with the reason for each if there is none."""
    reasons = []
    runtimes: tuple[Runtime, ...] = ("binary", "embedded", "docker")
    for runtime in runtimes:
        try:
            _FIND[runtime]()
        except ServerError as error:
            reasons.append(f"{runtime}: {error.problem}")
        else:
            return runtime
    raise ServerError(
        f"there is no Triton here ({'; '.join(reasons)})",
        hint=f"put tritonserver on PATH, or {install_command('llmserve[embedded]')} "
        "on Python 3.10 to 3.12, or start Docker",
    )


def find_problems(settings: ServerSettings) -> list[Problem]:
    """Return the problems that prevent serving this repository with these settings.

    :mod:`llmserve.repository.check` finds the problems of the models themselves.
    """
    repository = settings.repository
    problems = _log_problems(settings.log_file)
    if not 0 <= settings.grace < 2**31:
        what = f"{settings.grace} is no valid grace period"
        problems.append(Problem("", what, "give seconds (--grace)", code="usage"))
    if not repository.is_dir():
        what = f"no repository at {repository}"
        return [Problem("", what, "llmserve build creates one"), *problems]
    problems += [
        Problem("", f"no model {name!r} in {repository}", near(name, settings.opened.models))
        for name in settings.models
        if name not in settings.opened.models
    ]
    problems += _text_problems(settings)
    if settings.otlp_endpoint:
        try:
            traces_url(settings.otlp_endpoint)
        except UsageError as error:
            problems.append(Problem.of(error))
    if settings.runtime == "embedded":
        problems += missing_backends(settings)
    if settings.runtime in ("embedded", "binary"):
        problems += shortages(settings)
    return problems


def _text_problems(settings: ServerSettings) -> Iterator[Problem]:
    """Yield which texts in and out of others' models are no tensors of these."""
    for name, texts in settings.texts.items():
        model = settings.opened.models.get(name)
        if model is None or model.config is None:
            continue
        sides = zip(
            ("input", "output"), texts, (model.config.input, model.config.output), strict=True
        )
        for key, text, side in sides:
            tensors = [tensor.name for tensor in side]
            # Without any, Triton asks the model itself for them.
            if tensors and text not in tensors:
                what = f"models.{name}.{key} of llmserve.toml: it has no {key} {text!r}"
                yield Problem(name, what, near(text, tensors), code="config")


def with_dependents(repository: Repository, failed: Mapping[str, str]) -> dict[str, str]:
    """Return models that fail and why, with the models and parts that are useless without them."""
    reasons = dict(failed)
    parts = {model.name: model.parts for model in repository}
    for name in parts:
        for part in parts[name]:
            if part in failed:
                reasons.setdefault(name, f"its part {part} failed")
    needed = {part for name in parts if name not in reasons for part in parts[name]}
    for name in [name for name in parts if name in reasons]:
        # A step of an ensemble that somebody wrote may have users of its own.
        for part in repository.built_with(name):
            if part not in needed:
                reasons.setdefault(part, f"it is a part of {name}, which failed")
    return reasons


def at_start(
    settings: ServerSettings, repository: Repository, on_demand: OnDemand
) -> ServerSettings:
    """Return the settings of a server that starts with the pinned models only."""
    good = settings.models or repository.models
    pinned = repository.with_parts(name for name in on_demand.pinned if name in good)
    return replace(settings, models=pinned, empty=not pinned)


def check_runtime(settings: ServerSettings, repository: Repository) -> LLMServeError | None:
    """Return why this Triton cannot load models while it runs, if it cannot."""
    if settings.runtime == "docker":
        hint = "leave out --on-demand, or run llmserve in the container"
        return UsageError("a Triton in a container cannot load models while it runs", hint=hint)
    offered = settings.models or repository.models
    scripts = [m.name for m in repository if m.name in offered and m.has_launch_script]
    if scripts:
        what = f"{scripts[0]} starts a server of several processes, which cannot load models"
        return UsageError(f"{what} while it runs", hint="leave out --on-demand")
    return None


def _log_problems(log: Path | None) -> list[Problem]:
    """Return why the log cannot be written to, or read to find out what stops the server."""
    if log is None:
        return []
    reason = ""
    if log.exists() and not log.is_file():
        reason = "it is not a regular file"
    elif not os.access(log if log.exists() else log.parent, os.W_OK):
        reason = "it is not writable" if log.parent.is_dir() else f"there is no {log.parent}"
    what = f"cannot write the log to {log} ({reason})"
    return [Problem("", what, code="usage")] if reason else []
