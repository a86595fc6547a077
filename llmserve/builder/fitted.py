"""Builds a model so that it fits into this machine, with a plugin that can compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llmserve.builder.build import BuildResult, build_spec
from llmserve.builder.fit import Choice, fit_spec
from llmserve.builder.plan import DEFAULT_OUTPUT, BuildSpec
from llmserve.builder.progress import Note
from llmserve.errors import UnservedError
from llmserve.plugins.registry import Registry


def build(
    plugin: str,
    model: str,
    *,
    name: str | None = None,
    output: str | Path = DEFAULT_OUTPUT,
    tokenizer: str | None = None,
    generator: str | None = None,
    batching: str | None = None,
    formatter: str | None = None,
    force: bool = False,
    vendor: bool = False,
    fit: bool | None = None,
    **options: object,
) -> BuildResult:
    """Build a model into a repository, as ``llmserve build`` does.

    What does not fit into this machine is refused before it is begun. With ``fit``, options are
    changed so that it fits; with ``fit=False``, it is tried as it is.
    """
    chosen = (tokenizer, generator, batching, formatter)
    spec = BuildSpec(plugin, model, name, Path(output), *chosen, options, force, vendor)
    change = None if fit is False else bool(fit)
    registry = Registry.load()
    return build_fitted(spec, registry, serves=False, change=change, report=lambda _: None)[1]


def build_fitted(
    spec: BuildSpec,
    registry: Registry,
    *,
    others: Sequence[str] = (),
    serves: bool,
    change: bool | None,
    report: Callable[[str], None],
) -> tuple[Choice, BuildResult]:
    """Build a model, and return what was chosen for it.

    If its plugin cannot compute it, the first of ``others`` that can does. ``serves`` and
    ``change`` are as in :func:`~llmserve.builder.fit.fit_spec`.
    """
    choice = fit_spec(spec, registry, serves=serves, change=change, report=report)
    try:
        return choice, build_spec(choice.spec, registry=registry, report=report)
    except UnservedError as error:
        if not others:
            raise
        following, *others = others
        report(Note(f"note: {error.problem}: {following} is used instead"))
    choice, built = build_fitted(
        replace(spec, plugin=following), registry,
        others=others, serves=serves, change=change, report=report,
    )  # fmt: skip
    return replace(choice, plugin=choice.plugin or following), built
