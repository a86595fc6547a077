"""What each key has used on each day, in a file beside the keys."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from llmserve.errors import ConfigError, LLMServeError
from llmserve_gateway.keys import locked, replace_file

log = logging.getLogger("llmserve.gateway")

DAYS = 92
"""How many days are kept."""
SHOWN_DAYS = 7
"""How many days are shown to who asks for no other number."""
_PAUSE = 60.0
"""Seconds between two writings: what was used meanwhile is lost if the gateway is killed."""
_PATIENCE = 3.0
_MAX_BYTES = 64 << 20
_MAX_ROWS = 100_000
"""Older days go first if there are so many keys that their days are more."""


class Used(NamedTuple):
    """What a key has used on a day."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def plus(self, other: Used) -> Used:
        return Used(*map(sum, zip(self, other, strict=True)))


Days = dict[str, dict[str, Used]]
"""What was used, by the day, in UTC, and the name of the key."""


def usage_file(keys: Path) -> Path:
    return keys.with_name(f"{keys.name}.usage")


def read_usage(keys: Path) -> Days:
    """Read what the keys of a file have used."""
    path = usage_file(keys)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError
        days = json.loads(content)["days"]
        return {
            str(day): {str(name): _used(row) for name, row in rows.items()}
            for day, rows in sorted(days.items())
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise ConfigError(what, hint="let this user read it") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = f"{path} does not say what keys have used"
        raise ConfigError(what, hint="move it away: a gateway then begins another") from None


def usage_rows(days: Days, last: int, name: str | None = None) -> list[dict[str, Any]]:
    """Return what was used on the last days, a row for each of them and each key, or one alone."""
    return [
        {"day": day, "name": each, **used._asdict()}
        for day, rows in sorted(days.items())[-last:]
        for each, used in sorted(rows.items())
        if name in (None, each)
    ]


def _used(row: object) -> Used:
    if not isinstance(row, list) or not all(type(each) is int and each >= 0 for each in row):
        raise ValueError
    return Used(*row)


def add_usage(keys: Path, new: Mapping[tuple[str, str], Used]) -> None:
    """Add what keys have used to what the file has, which other gateways may write as well."""
    # Who may read the folder may lock it, for which no gateway waits when it ends.
    with locked(keys, _PATIENCE):
        days = read_usage(keys)
        _add_to(days, new)
        kept: Days = {}
        room = _MAX_ROWS
        for day in sorted(days, reverse=True)[:DAYS]:
            room -= len(days[day])
            if room < 0 and kept:
                break
            kept[day] = days[day]
        text = json.dumps({"days": kept}, separators=(",", ":"), sort_keys=True) + "\n"
        replace_file(usage_file(keys), text)


def _add_to(days: Days, new: Mapping[tuple[str, str], Used]) -> None:
    for (day, name), used in new.items():
        rows = days.setdefault(day, {})
        rows[name] = rows.get(name, Used()).plus(used)


def _today() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


class KeyUsage:
    """Counts what keys use, and writes it now and then. All of it runs on one event loop."""

    def __init__(self, keys: Path, today: Callable[[], str] = _today) -> None:
        self._keys = keys
        self._today = today
        self._new: dict[tuple[str, str], Used] = {}
        """What is not in the file yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._changing = asyncio.Lock()
        """Held while what is new becomes a part of the file: it is in neither meanwhile."""
        self._problem = ""

    def note(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Count a request of a key."""
        self._add({(self._today(), name): Used(1, prompt_tokens, answer_tokens)})
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_PAUSE, self._write_soon)

    async def read(self) -> Days:
        """Return what keys have used until now."""
        async with self._changing:
            days = await asyncio.to_thread(read_usage, self._keys)
            _add_to(days, self._new)
        return days

    async def close(self) -> None:
        """Write what is not written yet."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await self._writing
        await self._write()

    def _write_soon(self) -> None:
        self._timer = None
        self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        problem = ""
        async with self._changing:
            new, self._new = self._new, {}
            if not new:
                return
            try:
                await asyncio.to_thread(add_usage, self._keys, new)
            except (OSError, LLMServeError) as error:
                self._add(new)
                problem = str(error)
        if problem and problem != self._problem:
            log.warning("what keys use is not written: %s", problem)
        self._problem = problem

    def _add(self, new: Mapping[tuple[str, str], Used]) -> None:
        for place, used in new.items():
            self._new[place] = self._new.get(place, Used()).plus(used)
        if len(self._new) > _MAX_ROWS:
            del self._new[min(self._new)]
