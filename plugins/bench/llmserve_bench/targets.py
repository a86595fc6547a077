"""The targets of a measurement: models already served, and variants built for it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmserve.client import ModelInfo, connect, parse_url
from llmserve.errors import LLMServeError, UsageError
from llmserve.plugin import (
    MODEL_ROLES,
    Address,
    BuildSpec,
    Registry,
    Repository,
    build_spec,
    known_options,
    make_plan,
    parse_assignments,
    ways_to_build,
)
from llmserve.runtime import contract
from llmserve.server import Server, ServerSettings, start
from llmserve_bench.engines import engine_of
from llmserve_bench.prompts import TokenCounter, find_counter
from llmserve_bench.results import Subject
from llmserve_bench.senders import Api

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LABEL = re.compile(r"([\w. -]+)=(?=[^=])")
OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    model: str
    url: str
    name: str = ""
    repository: Path | None = None
    tokenizer: Path | None = None
    metrics_url: str | None = None
    http_url: str | None = None
    build: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    api: Api = "triton"
    memory: Callable[[], int | None] = lambda: None
    """Returns the bytes that its processes have, if they are of this program."""

    def info(self) -> ModelInfo:
        if self.api != "triton":
            # An OpenAI endpoint does not report what it accepts.
            if self.api == "embeddings":
                return ModelInfo(self.model, "unary", False, None, {}, {}, task=contract.EMBED)
            return ModelInfo(self.model, "stream", False, None, {}, {})
        with connect(self.url) as client:
            return client.model(self.model)

    @property
    def triton(self) -> Address:
        return parse_url(self.url).triton(http=self.http_url or "", metrics=self.metrics_url or "")

    def counter(self) -> TokenCounter:
        return find_counter(self.repository, self.model, self.tokenizer)

    @property
    def subject(self) -> Subject:
        # Another server's model of the same name is not the one in the repository.
        repository = self.repository if self.api == "triton" else None
        engine = engine_of(repository, self.model) if repository else ""
        name = self.name or self.model
        return Subject(name, self.model, self.url, self.build, self.server, engine)


@dataclass(frozen=True)
class Variant:
    """A build of a model: a recipe, and the settings that differ from its defaults."""

    label: str
    plugin: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return _NOT_IN_NAMES.sub("-", self.label).strip("-._") or "model"

    @property
    def components(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key in MODEL_ROLES}

    def spec(self, model: str, output: Path) -> BuildSpec:
        parts = self.components
        options = {key: value for key, value in self.settings.items() if key not in parts}
        return BuildSpec(
            self.plugin, model, name=self.name, output=output, options=options, **parts
        )

    def check(self, model: str, registry: Registry) -> None:
        """Raise an error if it cannot be built, before anything is built."""
        make_plan(self.spec(model, Path()), registry)

    def option_names(self, registry: Registry) -> set[str] | None:
        """Return the options of the build; None if the build will be refused anyway."""
        try:
            recipe = registry.recipe(self.plugin)
            if self.components:
                # The recipe's defaults may name options of a component that was replaced.
                recipe = replace(recipe, **self.components, defaults={})
            return {*MODEL_ROLES, *(option.name for option in known_options(recipe, registry))}
        except LLMServeError:
            return None


def parse_subject(text: str) -> Variant | Target:
    """Parse a subject of ``compare``.

    ``PLUGIN:KEY=VALUE,...`` (or ``PLUGIN:``) must be built; ``MODEL`` or ``MODEL@URL`` is already
    served. A leading ``LABEL=`` names either.

    >>> parse_subject("static=iterative:batching=static")
    Variant(label='static', plugin='iterative', settings={'batching': 'static'})
    >>> parse_subject("demo@127.0.0.1:9001").url
    '127.0.0.1:9001'
    """
    label, rest = "", text
    head = _LABEL.match(text)
    if head and not {":", "@"} & set(head[0]):
        label, rest = head[1], text[head.end() :]
    model, _, url = rest.partition("@")
    plugin, colon, settings = rest.partition(":")
    if url or not colon:
        return Target(model, url, label or rest)
    own = parse_assignments([setting for setting in settings.split(",") if setting])
    return Variant(label or rest.rstrip(":"), plugin, own)


def with_settings(
    variants: Sequence[Variant], common: Mapping[str, str], registry: Registry, on_step: OnStep
) -> list[Variant]:
    """Add to each variant the common settings that its recipe has; its own take precedence.

    A setting that only some have is reported. One that none has is left for the build to refuse.
    """
    options = {variant.label: variant.option_names(registry) for variant in variants}
    added: dict[str, dict[str, str]] = {label: {} for label in options}
    for name, value in common.items():
        matching = [label for label, names in options.items() if names is None or name in names]
        if 0 < len(matching) < len(options):
            on_step(f"{name}={value} applies only to {' and '.join(matching)}")
        for label in matching or options:
            added[label][name] = value
    return [replace(v, settings={**added[v.label], **v.settings}) for v in variants]


def suited(model: str, registry: Registry) -> list[Variant]:
    """Return the ways to serve a model that suit this machine, the most exact one first."""
    ways = ways_to_build(model, registry)
    if len(ways) < 2:
        raise UsageError(
            f"there is no model {model}, or it is not known how large it is",
            hint="name variants, such as iterative: openvino:weight_format=int8",
        )
    # The sort keeps the best one for this machine before others that are as exact.
    ways.sort(key=lambda way: (bool(way.changes), -way.needs.weights))
    return [
        Variant(
            " ".join([str(way.plugin), *map(str, way.changes.values())]),
            way.plugin,
            {key: str(value) for key, value in way.changes.items()},
        )
        for way in ways
    ]


@contextmanager
def serving(
    variants: Sequence[Variant], model: str, registry: Registry, on_step: OnStep
) -> Iterator[list[Target]]:
    """Build variants and serve all from one server; an idle model costs only memory."""
    if not variants:
        yield []
        return
    names = [variant.name for variant in variants]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        hint = "give them labels, as in LABEL=PLUGIN:..."
        raise UsageError(f"two variants are named {duplicates[0]}", hint=hint)
    for variant in variants:
        variant.check(model, registry)
    with tempfile.TemporaryDirectory(prefix="llmserve-bench-") as folder:
        repository = Path(folder) / "model_repository"
        for variant in variants:
            on_step(f"building {variant.label}")
            build_spec(variant.spec(model, repository), registry=registry, report=on_step)
        on_step(f"serving {', '.join(variant.label for variant in variants)}")
        models = Repository.open(repository).with_parts(names)
        settings = ServerSettings(
            repository, http_port=0, grpc_port=0, metrics_port=0, models=models
        )
        with start(settings) as server:
            yield [
                Target(
                    variant.name,
                    server.grpc_url,
                    name=variant.label,
                    repository=repository,
                    metrics_url=server.metrics_url,
                    http_url=server.http_url,
                    build={"plugin": variant.plugin, "model": model, **variant.settings},
                    server=server.runtime,
                    memory=partial(_memory, server, variant.name),
                )
                for variant in variants
            ]


def _memory(server: Server, model: str) -> int | None:
    """Return what a model's processes have; None for one that Triton computes in its own."""
    server.stubs.poll()
    return server.stubs.memory(model)[0] or None
