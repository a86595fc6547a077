"""API keys: their hashes in a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError, UsageError
from llmserve_gateway.errors import ApiError

log = logging.getLogger("llmserve.gateway")

_MINUTE = 60.0


@dataclass
class Key:
    name: str
    sha256: str
    models: list[str] = field(default_factory=list)
    """The models it may ask; all of them where none is named."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass
class _Budget:
    """A bucket that fills up over a minute."""

    left: float
    at: float

    def take(self, amount: float, per_minute: int) -> float:
        """Take from it; return after how many seconds that will be possible, 0 if it is now."""
        now = time.monotonic()
        self.left = min(per_minute, self.left + (now - self.at) * per_minute / _MINUTE)
        self.at = now
        if self.left >= min(amount, per_minute):
            self.left -= amount
            return 0.0
        return (min(amount, per_minute) - self.left) * _MINUTE / per_minute


def hashed(key: str) -> str:
    """Return what the file holds of a key; keys are random, so a plain hash will do."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key(path: Path, name: str, **limits: Any) -> str:
    """Add a key to a file and return it; it is stored nowhere else."""
    if not name.strip():
        raise UsageError("a key needs a name", mend="llmserve key new alice")
    keys = read_keys(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise UsageError(f"{path} has a key called {name!r}", mend="take another name")
    key = f"sk-{secrets.token_urlsafe(32)}"
    keys.append(Key(name, hashed(key), **limits))
    text = json.dumps({"keys": [vars(one) for one in keys]}, indent=2) + "\n"
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        written.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", mend="name another place with --file"
        ) from None
    return key


def read_keys(path: Path) -> list[Key]:
    """Read the file of keys, or say in one line what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [_checked(Key(**entry)) for entry in content["keys"]]
    except OSError as error:
        raise ConfigError(
            f"cannot read the keys in {path}: {error.strerror}",
            mend=f"llmserve key new NAME --file {path}",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no file of keys ({error})", mend="llmserve key new writes one"
        ) from None


def _checked(key: Key) -> Key:
    rates = (key.requests_per_minute, key.tokens_per_minute)
    if not (
        isinstance(key.name, str)
        and isinstance(key.sha256, str)
        and re.fullmatch("[0-9a-f]{64}", key.sha256)
        and isinstance(key.models, list)
        and all(isinstance(model, str) for model in key.models)
        and all(rate is None or (type(rate) is int and rate > 0) for rate in rates)
    ):
        raise ValueError(f"the entry of {str(key.name)[:80]!r} is none that it writes")
    return key


class KeyRing:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_keys(path)
        self._stamp = self._changed()
        self._budgets: dict[tuple[str, str], _Budget] = {}

    def find(self, authorization: str) -> Key:
        """Return whose key a header brings; every key is compared, and in constant time."""
        self._read_again()
        scheme, _, key = authorization.partition(" ")
        given = hashed(key.strip() if scheme.lower() == "bearer" else "")
        found = [one for one in self._keys if hmac.compare_digest(one.sha256, given)]
        if not found:
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return found[0]

    def spend(self, key: Key, tokens: int) -> None:
        """Count a request against its key's rates, or refuse it."""
        for what, amount, rate in (
            ("requests", 1, key.requests_per_minute),
            ("tokens", tokens, key.tokens_per_minute),
        ):
            if rate is None:
                continue
            fresh = _Budget(float(rate), time.monotonic())
            budget = self._budgets.setdefault((key.name, what), fresh)
            if seconds := budget.take(amount, rate):
                raise ApiError(
                    429,
                    f"this key has {rate} {what} a minute",
                    code="rate_limit_exceeded",
                    headers={
                        "retry-after": str(int(seconds) + 1),
                        "retry-after-ms": str(int(seconds * 1000) + 1),
                    },
                )

    def _changed(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0)
        return stat.st_mtime_ns, stat.st_ino

    def _read_again(self) -> None:
        if (stamp := self._changed()) != self._stamp:
            self._stamp = stamp
            # A file that is wrong or gone lets nobody in who was not in it before.
            try:
                self._keys = read_keys(self._path) if stamp != (0, 0) else []
            except ConfigError as error:
                log.error("%s; the keys that were read before are good until it is mended", error)
