"""Which model a request names: by its name, as ``MODEL:ADAPTER``, by an adapter's own name, or by
another that the gateway was told."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from types import MappingProxyType
from typing import Any, NamedTuple

from llmserve.errors import LLMServeError, UsageError
from llmserve.runtime import is_adapter_name
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.keys import Key

_FRESH = 2.0
"""Seconds after which it is seen again, beside requests, which models have which adapters."""


class Named(NamedTuple):
    """A model, and the adapter that it is to answer with, if any."""

    model: str
    adapter: str = ""

    @property
    def full(self) -> str:
        """How ``/v1/models`` and the models of a key have it."""
        return f"{self.model}:{self.adapter}" if self.adapter else self.model


def read_aliases(words: Sequence[str]) -> dict[str, str]:
    """Return other names of models, each given as ``NAME=MODEL``."""
    found: dict[str, str] = {}
    for word in words:
        name, _, model = word.rpartition("=")
        if not name or not model:
            raise UsageError(f"--alias {word!r} names no model", hint="give NAME=MODEL")
        if found.setdefault(name, model) != model:
            what = f"--alias has {name!r} for {found[name]} and for {model}"
            raise UsageError(what, hint="give each name once")
    return found


class ModelNames:
    """What names mean. Each adapter is a model as well where its name says of which model."""

    def __init__(self, catalog: Catalog, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self._catalog = catalog
        self.aliases = aliases
        self._names: Collection[str] = ()
        """The models, and the models that have an adapter by its name, when they were last seen."""
        self._models: Mapping[str, Sequence[str]] = {}
        self._seen_at = -math.inf
        self._see_names = _Shared(self._read_names)
        self._see_adapters = _Shared(self._read_adapters)

    async def find(self, name: str, key: Key | None) -> Named:
        """Return what a name means to a key; one that means nothing is returned as a model's."""
        found = self.known(name)
        if found is None:
            await self._look(meant := self._meant(name))
            found = self.known(meant) or [Named(meant)]
        allowed = _allowed(found, key)
        if len(allowed) > 1:
            choices = ", ".join(named.full for named in allowed)
            what = f"several models have an adapter {name!r}: name one of {choices}"
            raise bad_request(what, "model", "ambiguous_model")
        return allowed[0] if allowed else Named(name)

    async def has_own_name(self, named: Named, key: Key | None) -> bool:
        """Return whether the name of an adapter alone means it, to a key."""
        if self.known(named.adapter) is None:
            await self._look(named.adapter)
        return _allowed(self.known(named.adapter) or (), key) == [named]

    def known(self, name: str) -> list[Named] | None:
        """Return all that a name may mean, None if that has to be looked up."""
        name = self._meant(name)
        model, colon, adapter = name.partition(":")
        if colon and adapter:
            return [Named(model, adapter)]
        is_model = name in self._names or self._catalog.is_observed(name)
        if is_model or not is_adapter_name(name):
            return [Named(name)]
        if (models := self._models.get(name)) is None:
            return None
        if time.monotonic() - self._seen_at > _FRESH:
            # Who names an adapter does not wait for its model to say that it has it.
            self._see_adapters()
        return [Named(each, name) for each in models]

    def _meant(self, name: str) -> str:
        """Return a name with that of a model in place of another one, which may have colons."""
        if model := self.aliases.get(name):
            return model
        before, colon, adapter = name.rpartition(":")
        model = self.aliases.get(before) if colon else None
        return f"{model}:{adapter}" if model else name

    async def _look(self, name: str) -> None:
        await self._see_names()
        if name in self._names:
            return
        was_under_way = self._see_adapters.is_under_way
        await self._see_adapters()
        if was_under_way and name not in self._models:
            # A model may have been asked before it had the adapter.
            await self._see_adapters()

    async def _read_names(self) -> None:
        with suppress(LLMServeError, ApiError):
            self._names = frozenset(await self._catalog.names())

    async def _read_adapters(self) -> None:
        await self._read_names()
        names = sorted(self._names)
        found: dict[str, list[str]] = {}
        each = await asyncio.gather(*map(self._catalog.adapters, names))
        for model, adapters in zip(names, each, strict=True):
            for adapter in adapters:
                found.setdefault(adapter, []).append(model)
        self._models, self._seen_at = found, time.monotonic()


class _Shared:
    """Work that is done once for all who want it at the same time."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._doing: asyncio.Future[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._doing is not None

    def __call__(self) -> asyncio.Future[None]:
        if self._doing is None:
            # It is no part of this request, and so not of its trace.
            self._doing = Context().run(asyncio.ensure_future, self._work())
            self._doing.add_done_callback(self._end)
        return asyncio.shield(self._doing)

    def _end(self, done: asyncio.Future[None]) -> None:
        del done
        self._doing = None


def _allowed(found: Sequence[Named], key: Key | None) -> list[Named]:
    return [named for named in found if key is None or key.allows(named.full)]
