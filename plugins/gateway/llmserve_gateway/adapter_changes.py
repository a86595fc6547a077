"""Adapters that requests add to models and remove, in the format of vLLM.

They come from one folder of the operator's, and from nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from llmserve.errors import IncompatibleError, ServerError
from llmserve.plugin import Model, Repository, model_adapters, remove_adapter
from llmserve.runtime import is_adapter_name
from llmserve.server import ask
from llmserve_gateway import adding_adapter
from llmserve_gateway.errors import ApiError, bad_request, queue_full
from llmserve_gateway.fields import Body, Field, flag, ignored, refused_if_sent, text
from llmserve_gateway.gateway import Settings, log
from llmserve_gateway.keys import Key
from llmserve_gateway.model_names import Named

_QUICK_SECONDS = 5.0
_SECONDS = 180.0
"""How long an adapter may take to be read; a process that reads one needs four to begin."""
_END_SECONDS = 5.0
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
"""Each thread of these libraries reserves memory, of which the process has a limit."""
_MAX_LENGTH = 1000
_MAX_CHANGES = 4
"""How many requests may wait while one is carried out."""


def _required(field: Field[str | None]) -> Field[str]:
    def check(value: Any, name: str) -> str:
        read = field.check(value, name)
        if read is None or len(read) > _MAX_LENGTH:
            raise bad_request(f"{name} is too long", name)
        return read

    schema = {**field.schema, "maxLength": _MAX_LENGTH}
    return Field(field.name, field.help, check, schema, required=True)


_NAME = _required(text("lora_name", "The name of the adapter, or MODEL:NAME if several have any."))
_PATH = _required(text("lora_path", "Its folder, within the folder that the server has for them."))
_IN_PLACE = flag("load_inplace", "Whether to replace one of that name.")
ADDITION = Body(
    _NAME, _PATH, _IN_PLACE, *refused_if_sent("adapters of experts", "is_3d_lora_weight")
)
REMOVAL = Body(_NAME, *ignored("lora_int_id"))


@dataclass(frozen=True)
class Addition:
    """An adapter that a request wants added."""

    name: str
    path: str
    in_place: bool


def read_addition(content: Mapping[str, Any]) -> Addition:
    values = ADDITION.read(content)
    return Addition(values[_NAME], values[_PATH], values[_IN_PLACE])


def read_removal(content: Mapping[str, Any]) -> str:
    return REMOVAL.read(content)[_NAME]


class AdapterChanges:
    """Changes the adapters of the models of the `serve` that has started this gateway."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._alone = asyncio.Lock()
        self._waiting = 0

    async def add(self, order: Addition, offered: Sequence[str], key: Key | None) -> str:
        """Add an adapter to one of the models on offer, and return vLLM's words for it."""
        return await self._one_by_one(self._add, order, offered, key)

    async def remove(self, name: str, offered: Sequence[str], key: Key | None) -> str:
        """Remove an adapter of one of the models on offer, and return vLLM's words for it."""
        return await self._one_by_one(self._remove, name, offered, key)

    async def _one_by_one(self, change: Any, *what: Any) -> str:
        if self._waiting > _MAX_CHANGES:
            raise queue_full("other adapters are being added or removed")
        # One whose client has gone goes on, and the next waits for it.
        changing = asyncio.ensure_future(self._in_turn(change, *what))
        changing.add_done_callback(lambda done: done.cancelled() or done.exception())
        said: str = await asyncio.shield(changing)
        return said

    async def _in_turn(self, change: Any, *what: Any) -> Any:
        self._waiting += 1
        try:
            async with self._alone:
                return await asyncio.to_thread(change, *what)
        finally:
            self._waiting -= 1

    def _add(self, order: Addition, offered: Sequence[str], key: Key | None) -> str:
        home, repository = self._places()
        if order.name in offered:
            what = f"The lora adapter {order.name[:200]!r} conflicts with a served base model."
            raise bad_request(what, _NAME.name)
        name, taking = _found(repository, order.name, offered, key)
        if not is_adapter_name(name):
            what = "use up to 64 letters, digits, dots and dashes, a letter or digit first"
            raise bad_request(f"an adapter cannot be called {name[:80]!r}: {what}", _NAME.name)
        model = _only([*taking], name)
        if name in taking[model] and not order.in_place:
            what = (
                f"The lora adapter {order.name!r} has already been loaded. If you want to load "
                "the adapter in place, set 'load_inplace' to True."
            )
            raise bad_request(what, _NAME.name)
        _run(home, model, name, order.path)
        log.info("added the adapter %s to %s", name, model.name)
        return f"Success: LoRA adapter '{order.name}' added successfully."

    def _remove(self, full_name: str, offered: Sequence[str], key: Key | None) -> str:
        _, repository = self._places()
        name, taking = _found(repository, full_name, offered, key)
        if not (having := [model for model, names in taking.items() if name in names]):
            what = f"The lora adapter {full_name[:200]!r} cannot be found."
            raise ApiError(404, what, param=_NAME.name, code="adapter_not_found")
        model = _only(having, name)
        remove_adapter(model, name)
        log.info("removed the adapter %s of %s", name, model.name)
        return f"Success: LoRA adapter '{full_name}' removed successfully."

    def _places(self) -> tuple[Path, Repository]:
        """Return the folder of adapters, and the models that are served."""
        home, supervisor = self._settings.adapter_folder, self._settings.supervisor
        if home is None or not isinstance(supervisor, Path):
            what = "adapters are not added by requests here: llmserve serve --adapter-folder FOLDER"
            raise ApiError(404, what, code="not_found")
        try:
            folder = ask(supervisor, {"do": "status"}, _QUICK_SECONDS).repository
        except ServerError as error:
            raise ApiError(503, str(error), code="backend_unavailable") from None
        return home, Repository.open(Path(folder))


def _found(
    repository: Repository, full_name: str, offered: Sequence[str], key: Key | None
) -> tuple[str, Mapping[Model, Sequence[str]]]:
    """Return the name of an adapter alone, and the models that it may mean with their adapters."""
    of, colon, name = full_name.partition(":")
    names = [of] if colon else offered
    taking: dict[Model, Sequence[str]] = {}
    for each in names:
        named = Named(each, name if colon else full_name)
        if each in offered and (key is None or key.allows(named.full)):
            with suppress(IncompatibleError):
                model = repository.model(each)
                taking[model] = [*model_adapters(model)]
    return (name if colon else full_name), taking


def _only(models: Sequence[Model], name: str) -> Model:
    if not models:
        what = f"no model that you may use can have the adapter {name[:80]!r}"
        raise ApiError(404, what, param=_NAME.name, code="model_not_found")
    if len(models) > 1:
        choices = ", ".join(Named(model.name, name).full for model in models)
        what = f"several models can have the adapter {name[:80]!r}: name one of {choices}"
        raise bad_request(what, _NAME.name, "ambiguous_model")
    return models[0]


def _run(home: Path, model: Model, name: str, path: str) -> None:
    """Have a process of its own read the adapter and add it."""
    words = [str(home), str(model.folder), name, path]
    with subprocess.Popen(
        [sys.executable, "-m", adding_adapter.__name__, *map(_printed, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **_ONE_THREAD},
    ) as process:  # fmt: skip
        assert process.stdout is not None  # noqa: S101
        # When it is only told to end, it takes away what it has copied.
        ends = [Timer(_SECONDS, process.terminate), Timer(_SECONDS + _END_SECONDS, process.kill)]
        for end in ends:
            end.start()
        said = process.stdout.read()
        for end in ends:
            end.cancel()
    with suppress(ValueError):
        match json.loads(said):
            case {"added": str(_), "notes": [*notes]}:
                for note in notes:
                    log.info("%s", note)
                return
            case {"missing": str(_)}:
                what = f"Loading lora {name} failed: No adapter found for {path[:200]}"
                raise ApiError(404, what, param=_PATH.name, code="adapter_not_found")
            case {"refused": str(why)}:
                raise bad_request(why, _PATH.name, "adapter_unusable")
    what = f"the adapter {name} takes too long to read, or too much memory"
    raise bad_request(what, _PATH.name, "adapter_unusable")


def _printed(word: str) -> str:
    return json.dumps(word)
