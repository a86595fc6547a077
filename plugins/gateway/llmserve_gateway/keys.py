"""API keys, whose hashes are stored in a file that is read for every request."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError, UsageError
from llmserve.runtime.contract import CLASSES
from llmserve_gateway.errors import ApiError
from llmserve_gateway.turns import WEIGHTS, Standing

log = logging.getLogger("llmserve.gateway")

_MINUTE = 60.0
_MAX_BYTES = 1 << 20
_LEAST_GIVEN, _LEAST_DIFFERENT = 16, 8
"""How many characters a key that was given has at least, and how many of them differ."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass
class Key:
    name: str
    sha256: str
    models: list[str] = field(default_factory=list)
    """The models that it may use; all of them if the list is empty."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    all_metrics: bool = False
    """Whether it sees the metrics of all models, and not only of those that it may use."""
    operator: bool = False
    """Whether it may load and unload the models that it may use."""
    adapters: bool = False
    """Whether it may add adapters to the models that it may use, and remove them."""
    stateless: bool = False
    """Whether nothing of its responses is kept, whatever its requests say."""
    weight: int = 1
    """By which weight it shares a class with the others."""
    priority: int = 0
    """The class of its requests: those of a lower number go first."""
    any_priority: bool = False
    """Whether a request of it may ask for a class above that; any may ask for one below."""

    def allows(self, model: str) -> bool:
        """Return whether it may use a model, or ``MODEL:ADAPTER``: who may use a model may use all
        its adapters."""
        return not self.models or bool({model, model.partition(":")[0]} & {*self.models})

    def allows_some(self, model: str) -> bool:
        """Return whether it may use a model or one of its adapters."""
        return self.allows(model) or any(n.partition(":")[0] == model for n in self.models)

    def standing(self, asked: int | None) -> Standing:
        """Return the standing of a request that asks for a class, or for none."""
        if asked is not None and asked < self.priority and not self.any_priority:
            what = f"this key's requests have priority {self.priority}: a lower number is above it"
            raise ApiError(403, what, param="priority", code="priority_not_allowed")
        return Standing(self.name, self.weight, self.priority if asked is None else asked)

    @property
    def measured_models(self) -> list[str]:
        """The models whose metrics it sees; all of them if the list is empty."""
        return [] if self.all_metrics else self.models


@dataclass
class BatchKey(Key):
    """A key, or the lack of one, in a request of a batch: it takes what other requests leave."""

    is_charged: bool = False
    """Whether the request counts already, since it has been asked before."""
    answer_tokens: int = 0
    """How many tokens of its answers count already, since one could not be kept."""
    may_load: bool = True
    """Whether a model may be loaded for it, and another make place: others do not use it now."""
    waits_for_model: bool = False


@dataclass
class _Budget:
    """A token bucket that refills within a minute."""

    remaining: float
    updated: float

    def left(self, per_minute: int) -> float:
        """Return what is left by now."""
        now = time.monotonic()
        refill = (now - self.updated) * per_minute / _MINUTE
        self.remaining = min(per_minute, self.remaining + refill)
        self.updated = now
        return self.remaining

    def take(self, amount: float, per_minute: int) -> float:
        """Take an amount; return 0, or the seconds until that is possible."""
        self.left(per_minute)
        if self.remaining >= min(amount, per_minute):
            self.remaining -= amount
            return 0.0
        return (min(amount, per_minute) - self.remaining) * _MINUTE / per_minute

    def spend(self, amount: float) -> None:
        """Take an amount that has been used already, and so cannot be refused."""
        self.remaining -= amount


def hash_key(key: str) -> str:
    """Return the hash that the file contains; keys are random, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


def salt_of(key: Key) -> str:
    """Return what tells the prompts of a key from those of others, and nothing of the key."""
    return hashlib.sha256(f"prompts of {key.sha256}".encode()).hexdigest()


def new_key(path: Path, name: str, **limits: Any) -> str:
    """Create a key, add its hash to a file and return the key, which is not stored."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    _add_key(path, name, key, limits)
    return key


def take_key(path: Path, name: str, key: str, **limits: Any) -> None:
    """Add the hash of a key that clients have already.

    A plain hash protects it only if it is hard to guess, so a short one is refused.
    """
    if len(key) < _LEAST_GIVEN or len({*key}) < _LEAST_DIFFERENT:
        raise UsageError(
            "this key is easy to guess",
            hint=f"give one of {_LEAST_GIVEN} random letters and digits or more, or have one made",
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError("no header can have this key", hint="give letters and digits")
    _add_key(path, name, key, limits)


def _add_key(path: Path, name: str, key: str, limits: Mapping[str, Any]) -> None:
    with _edited(path, new=True) as keys:
        _check_name(path, keys, name)
        if any(each.sha256 == hash_key(key) for each in keys):
            raise UsageError(f"{path} has this key already", hint="revoke that one first")
        keys.append(Key(name, hash_key(key), **limits))


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of a file."""
    with _edited(path) as keys:
        _named(path, keys, name)
        keys[:] = [key for key in keys if key.name != name]


def change_key(path: Path, name: str, /, **changes: Any) -> None:
    """Change fields of a key in a file: its name, its models, its limits, or what else it may."""
    with _edited(path) as keys:
        for key in _named(path, keys, name):
            if (new := changes.get("name", name)) != name:
                _check_name(path, keys, new)
            keys[keys.index(key)] = replace(key, **changes)


def _check_name(path: Path, keys: Sequence[Key], name: str) -> None:
    if not name.strip():
        raise UsageError("a key needs a name", hint="llmserve key new alice")
    if any(key.name == name for key in keys):
        raise UsageError(
            f"{path} already has a key named {name!r}",
            hint="use another name, or llmserve key revoke that one first",
        )


def _named(path: Path, keys: Sequence[Key], name: str) -> list[Key]:
    if found := [key for key in keys if key.name == name]:
        return found
    hint = f"llmserve key list --file {path} shows those that there are"
    raise UsageError(f"{path} has no key named {name!r}", hint=hint)


@contextmanager
def _edited(path: Path, *, new: bool = False) -> Iterator[list[Key]]:
    """Yield the keys of a file, which gets what they are at the end, as a whole.

    Whoever else edits it waits. Who reads it has it as it was before, or as it is then.
    """
    with locked(path):
        keys = [] if new and not path.exists() else read_keys(path)
        yield keys
        replace_file(path, json.dumps({"keys": [vars(key) for key in keys]}, indent=2) + "\n")


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Have whoever else edits a file of this folder wait, and wait for them, but not for longer."""
    try:
        # The file itself is another one after each change.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        if seconds is None:
            fcntl.flock(folder, fcntl.LOCK_EX)
        elif not _lock_within(folder, seconds):
            raise _unwritable(
                path, OSError(errno.EAGAIN, "another program holds the lock on its folder")
            )
        yield
    finally:
        os.close(folder)


def _lock_within(folder: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def replace_file(path: Path, text: str) -> None:
    """Replace a file, whose folder is locked, by another of the same mode."""
    try:
        _replace(path, text)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unwritable(path, error) from None


def _replace(path: Path, text: str) -> None:
    """Replace a file by another that the same users may read: at first, its owner alone."""
    # A file of mode 0600.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if path.exists():
                # A gateway of another user must be able to read that a key is gone.
                before = path.stat()
                if before.st_gid != os.fstat(file.fileno()).st_gid:
                    os.fchown(file.fileno(), -1, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {path}: {error.strerror}", hint="give another path with --file"
    )


def read_keys(path: Path) -> list[Key]:
    """Read the key file, or raise an error of one line that explains what is wrong with it."""
    try:
        return _parsed(path, _content(path))
    except FileNotFoundError as error:
        raise _unreadable(path, error, f"llmserve key new NAME --file {path}") from None


def _unreadable(path: Path, error: OSError, hint: str) -> ConfigError:
    return ConfigError(f"cannot read the keys in {path}: {error.strerror}", hint=hint)


def _content(path: Path) -> bytes:
    """Read a file that nobody else can write to."""
    try:
        # Opening a pipe would wait for its other end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error, "let this user read it") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} is over {_MAX_BYTES >> 20} MB", hint="remove unused keys")
    return content


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a file", hint="create one with llmserve key new")
    if status.st_mode & _OTHERS_WRITE:
        raise ConfigError(f"other users can write to {path}", hint=f"chmod go-w {path}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to another user", hint=f"chown {os.geteuid()} {path}, or copy it"
        )


def _parsed(path: Path, content: bytes) -> list[Key]:
    try:
        return [_validated(Key(**entry)) for entry in json.loads(content)["keys"]]
    except RecursionError:
        why = "it is nested too deeply"
    except (ValueError, KeyError, TypeError) as error:
        why = str(error)[:200]
    raise ConfigError(f"{path} is not a key file ({why})", hint="create one with llmserve key new")


def _validated(key: Key) -> Key:
    rates = (key.requests_per_minute, key.tokens_per_minute)
    if not (
        isinstance(key.name, str)
        and isinstance(key.sha256, str)
        and re.fullmatch("[0-9a-f]{64}", key.sha256)
        and isinstance(key.models, list)
        and all(isinstance(model, str) for model in key.models)
        and isinstance(key.all_metrics, bool)
        and isinstance(key.operator, bool)
        and isinstance(key.adapters, bool)
        and isinstance(key.any_priority, bool)
        and type(key.weight) is int
        and key.weight in WEIGHTS
        and type(key.priority) is int
        and key.priority in CLASSES
        and all(rate is None or (type(rate) is int and rate > 0) for rate in rates)
    ):
        raise ValueError(f"the entry {str(key.name)[:80]!r} is malformed")
    if key.sha256 == hash_key(""):
        raise ValueError(f"the entry {key.name[:80]!r} has the hash of an empty key")
    return key


class KeyRing:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_keys(path)
        self._content: bytes | None = None
        self._problem = ""
        self._budgets: dict[tuple[str, str], _Budget] = {}

    def authenticate(self, authorization: str) -> Key:
        """Return the key in a header; all keys are compared, each in constant time."""
        self._reload_if_changed()
        scheme, _, token = authorization.partition(" ")
        sha256 = hash_key(token.strip() if scheme.lower() == "bearer" else "")
        matches = [key for key in self._keys if hmac.compare_digest(key.sha256, sha256)]
        if not matches:
            what = "a valid API key is required: Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key")
        return matches[0]

    def of_hash(self, sha256: str) -> Key | None:
        """Return the key of a hash, None if it has been withdrawn."""
        self._reload_if_changed()
        return next((key for key in self._keys if key.sha256 == sha256), None)

    @property
    def several(self) -> bool:
        """Whether there are keys that one of them could take everything from."""
        return len(self._keys) > 1

    def charge(self, key: Key, tokens: int, requests: int = 1, *, take: bool = True) -> None:
        """Count a request against the rate limits of its key, or refuse it.

        One for several answers counts as so many ``requests``. Without ``take``, it is only
        refused if it would be.
        """
        taken: list[tuple[_Budget, int]] = []
        for unit, amount, rate in (
            ("requests", requests, key.requests_per_minute),
            ("tokens", tokens, key.tokens_per_minute),
        ):
            if rate is None:
                continue
            budget = self._budget(key, unit, rate)
            if seconds := budget.take(amount, rate):
                # What is refused for its tokens is no request of this minute.
                _give_back(taken)
                raise ApiError(
                    429,
                    f"this key is limited to {rate} {unit} per minute",
                    code="rate_limit_exceeded",
                    headers={
                        "retry-after": str(int(seconds) + 1),
                        "retry-after-ms": str(int(seconds * 1000) + 1),
                    },
                )
            taken.append((budget, amount))
        if not take:
            _give_back(taken)

    def headers(self, key: Key) -> dict[str, str]:
        """Return what is left of the limits of a key, by the names of OpenAI's API."""
        found: dict[str, str] = {}
        for unit, rate in (
            ("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)
        ):  # fmt: skip
            if rate is None:
                continue
            left = self._budget(key, unit, rate).left(rate)
            found[f"x-ratelimit-limit-{unit}"] = str(rate)
            found[f"x-ratelimit-remaining-{unit}"] = str(max(0, int(left)))
            found[f"x-ratelimit-reset-{unit}"] = f"{(rate - left) * _MINUTE / rate:.2f}s"
        return found

    def charge_answer(self, key: Key, tokens: int) -> None:
        """Count the tokens of an answer; later requests are refused if they are over the limit."""
        if key.tokens_per_minute is not None:
            self._budget(key, "tokens", key.tokens_per_minute).spend(tokens)

    def _budget(self, key: Key, unit: str, rate: int) -> _Budget:
        return self._budgets.setdefault((key.name, unit), _Budget(float(rate), time.monotonic()))

    def _reload_if_changed(self) -> None:
        """Read the keys again if the file's content is another; its times could be the same."""
        problem = ""
        try:
            content = _content(self._path)
            if content != self._content:
                self._content, self._problem = content, ""
                self._keys = _parsed(self._path, content)
        except FileNotFoundError:
            self._keys, self._content = [], None
        except ConfigError as error:
            # An invalid file never admits a key that was not in it before.
            problem = str(error)
        if problem and problem != self._problem:
            log.error("%s; the previous keys stay valid until the file is fixed", problem)
            self._problem = problem


def _give_back(taken: list[tuple[_Budget, int]]) -> None:
    for budget, amount in taken:
        budget.remaining += amount
