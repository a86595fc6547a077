"""Which adapters are in memory: those of running sequences, and others as far as they fit."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from llmserve.runtime.errors import RequestError
from llmserve.runtime.lora import CONFIG, WEIGHTS, Lora, LoraError, is_adapter_name, read_lora


class AdapterHome(Protocol):
    """What keeps the weights of adapters, and adds them to a model's products."""

    def fits(self, lora: Lora) -> None:
        """Raise :class:`LoraError` if it does not fit the model."""

    def size(self, lora: Lora) -> int:
        """Return how many bytes it takes in memory."""

    def load(self, key: str, lora: Lora) -> None:
        """Load its weights; raise :class:`LoraError` if they cannot be used."""

    def unload(self, key: str) -> None:
        """Forget its weights; it is one that was loaded."""


class Adapters:
    """The adapters of a model, which come and go on the disk while it is served.

    A key is a name and the state of its files: one that is replaced is another adapter.
    """

    def __init__(self, folder: Path, home: AdapterHome, budget: int) -> None:
        self._folder, self._home, self._budget = folder, home, budget
        self._seen = _identity(folder)
        self._known: dict[str, tuple[str, Lora]] = {}
        """The last key of each name, and what its files are."""
        self._loaded: OrderedDict[str, int] = OrderedDict()
        """The bytes of each; the least recently used first."""
        self._holders: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    @property
    def bytes(self) -> int:
        return sum(self._loaded.values())

    def find(self, name: str) -> str:
        """Return the key of a name; refuse one that is not there, or does not fit the model."""
        if _identity(self._folder) not in (self._seen, None):
            # Those of a model that was built in its place are for other weights.
            raise RequestError(
                "the model has other adapters than when it was loaded: load it again",
                code="adapter_not_found",
                param="adapter",
            )
        key = self._key(name)
        if not key:
            self._known.pop(name, None)
            raise RequestError(
                f"the model has no adapter {name[:64]!r}", code="adapter_not_found", param="adapter"
            )
        if self._known.get(name, ("",))[0] != key:
            try:
                lora = read_lora(self._folder / name)
                self._home.fits(lora)
            except LoraError as error:
                raise _unusable(name, error) from None
            self._known[name] = key, lora
        return key

    def hold(self, name: str, key: str) -> bool:
        """Have an adapter in memory until it is released; return whether there is space for it.

        One that is larger than the budget is loaded when no other is held.
        """
        if key not in self._loaded:
            known, lora = self._known.get(name, ("", None))
            if lora is None or known != key:
                raise _replaced(name)
            wanted = self._home.size(lora)
            while self.bytes + wanted > self._budget and self._make_space():
                pass
            if self.bytes + wanted > self._budget and self._holders:
                return False
            try:
                self._home.load(key, lora)
            except LoraError as error:
                raise _unusable(name, error) from None
            if self._key(name) != key:
                # What was read may be another's.
                self._home.unload(key)
                raise _replaced(name)
            self._loaded[key] = wanted
        self._loaded.move_to_end(key)
        self._holders[key] = self._holders.get(key, 0) + 1
        return True

    def release(self, key: str) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]

    def digest(self, name: str, key: str) -> str | None:
        """Return a digest of what is in an adapter's files; None if they are no longer those."""
        if key not in self._digests:
            found = hashlib.sha256()
            try:
                for file in (CONFIG, WEIGHTS):
                    found.update((self._folder / name / file).read_bytes())
            except OSError:
                return None
            if self._key(name) != key:
                return None
            self._digests[key] = found.hexdigest()
        return self._digests[key]

    def _key(self, name: str) -> str:
        """Return the key of what a name has on the disk now; empty if that is nothing."""
        if not is_adapter_name(name):
            return ""
        try:
            states = [(self._folder / name / file).stat() for file in (CONFIG, WEIGHTS)]
        except OSError:
            return ""
        return "-".join([name, *(f"{s.st_ino}.{s.st_mtime_ns}.{s.st_size}" for s in states)])

    def _make_space(self) -> bool:
        unused = next((key for key in self._loaded if key not in self._holders), None)
        if unused is None:
            return False
        self._home.unload(unused)
        del self._loaded[unused]
        return True


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what tells a folder from another at the same place; None if there is none."""
    try:
        state = folder.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _replaced(name: str) -> RequestError:
    return RequestError(
        f"the adapter {name!r} was replaced while the request waited: send it again",
        code="adapter_not_found",
        param="adapter",
    )


def _unusable(name: str, error: LoraError) -> RequestError:
    return RequestError(f"the adapter {name!r} {error}", code="adapter_unusable", param="adapter")
