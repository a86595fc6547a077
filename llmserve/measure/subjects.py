"""What is compared: models that are served already, and variants built for the purpose."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve.builder import BuildSpec, build_spec
from llmserve.builder.plan import known_options
from llmserve.errors import LLMServeError, UsageError
from llmserve.measure.bench import Target
from llmserve.measure.job import Place
from llmserve.options import parse_assignments
from llmserve.registry import Registry
from llmserve.server import ServerSettings, start

_PARTS = ("batching", "tokenizer", "formatter")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """A variant of a model to be built: a recipe, and what departs from its defaults."""

    label: str
    plugin: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name under which Triton serves it."""
        return _NOT_IN_NAMES.sub("-", self.label).strip("-._") or "model"

    def spec(self, model: str, output: Path) -> BuildSpec:
        """Say it as a build."""
        parts = {name: str(self.settings[name]) for name in _PARTS if name in self.settings}
        return BuildSpec(
            self.plugin,
            model,
            name=self.name,
            output=output,
            tokenizer=parts.get("tokenizer"),
            batching=parts.get("batching"),
            formatter=parts.get("formatter"),
            options={key: value for key, value in self.settings.items() if key not in parts},
        )


@dataclass(frozen=True)
class Served:
    """A model that is served already, at a URL of its own or at the common one."""

    label: str
    model: str
    url: str | None = None


def parse_subject(text: str) -> Built | Served:
    """Read a subject as the command line has it.

    ``PLUGIN:KEY=VALUE,KEY=VALUE`` (or ``PLUGIN:``) is to be built, ``MODEL`` or ``MODEL@URL`` is
    served already; ``LABEL=`` in front gives either a shorter name.

    >>> parse_subject("static=iterative:batching=static")
    Built(label='static', plugin='iterative', settings={'batching': 'static'})
    >>> parse_subject("demo@127.0.0.1:9001")
    Served(label='demo@127.0.0.1:9001', model='demo', url='127.0.0.1:9001')
    """
    head = re.match(r"([\w. -]+)=(?=[^=])", text)
    label = None
    if head and ":" not in text[: head.end()] and "@" not in text[: head.end()]:
        label, text = head[1], text[head.end() :]
    model, at, url = text.partition("@")
    if at:
        return Served(label or text, model, url)
    plugin, colon, settings = text.partition(":")
    if not colon:
        return Served(label or text, text)
    assignments = [part for part in settings.split(",") if part]
    return Built(label or text.rstrip(":"), plugin, dict(parse_assignments(assignments)))


def with_defaults(
    variants: Sequence[Built], common: Mapping[str, Any], *, report: Report = lambda _: None
) -> list[Built]:
    """Give variants what all are built with, as far as each knows it; its own settings come first.

    What only some know is reported, and what none knows is left for the build to refuse.
    """
    registry = Registry.load()
    known = [_options(variant, registry) for variant in variants]
    given: list[dict[str, Any]] = [{} for _ in variants]
    for name, value in common.items():
        having = [at for at, names in enumerate(known) if names is None or name in names]
        for at in having or range(len(variants)):
            given[at][name] = value
        if 0 < len(having) < len(variants):
            labels = " and ".join(variants[at].label for at in having)
            report(f"{name}={value} is for {labels} alone")
    return [
        Built(variant.label, variant.plugin, {**own, **variant.settings})
        for variant, own in zip(variants, given, strict=True)
    ]


def _options(built: Built, registry: Registry) -> set[str] | None:
    """Name what a variant can be built with; None where the build itself will be refused."""
    try:
        recipe = registry.recipe(built.plugin)
        own: dict[str, Any] = {key: built.settings[key] for key in _PARTS if key in built.settings}
        options = known_options(replace(recipe, **own), registry)
    except LLMServeError:
        return None
    return {*_PARTS, *(option.name for option in options)}


@contextmanager
def serving(
    variants: Sequence[Built], model: str, *, report: Report = lambda _: None
) -> Iterator[list[Target]]:
    """Build variants of a model, serve them all from one embedded server, and take both away.

    Those that do nothing cost nothing but memory, and one server means the same server.
    """
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"two variants are called {twice[0]}", mend="give them labels, as in LABEL=PLUGIN:..."
        )
    with tempfile.TemporaryDirectory(prefix="llmserve-measure-") as folder:
        repository = Path(folder) / "model_repository"
        for variant in variants:
            report(f"building {variant.label}")
            build_spec(variant.spec(model, repository), report=report)
        report(f"serving {', '.join(variant.label for variant in variants)}")
        settings = ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0)
        with start(settings) as server:
            yield [
                Target(
                    model=variant.name,
                    place=Place(server.grpc_url),
                    name=variant.label,
                    repository=repository,
                    metrics_url=server.metrics_url,
                    http_url=server.http_url,
                    build={"plugin": variant.plugin, "model": model, **variant.settings},
                    server=server.runtime,
                )
                for variant in variants
            ]
