"""What is known of releases, in a file, so that a gateway that starts again goes on with it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError, LLMServeError
from llmserve_gateway.keys import replace_file
from llmserve_gateway.releases.release import Release

log = logging.getLogger("llmserve.gateway")

_PAUSE = 10.0
"""Seconds between two writings: what was compared meanwhile is lost if the gateway is killed."""
_MAX_BYTES = 1 << 20


def read_releases(path: Path) -> dict[str, Any]:
    """Read what a file says of releases, by the models' names; nothing if there is none yet."""
    if not path.parent.is_dir():
        hint = "name another with --release-file"
        raise ConfigError(f"there is no folder {path.parent} for {path.name}", hint=hint)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError
        releases = json.loads(content)["releases"]
        if not isinstance(releases, dict):
            raise TypeError
        return releases
    except FileNotFoundError:
        return {}
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}"
        raise ConfigError(what, hint="let this user read it") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path) from None


def _damaged(path: Path) -> ConfigError:
    what = f"{path} does not say what is known of releases"
    return ConfigError(what, hint="move it away: releases then begin anew")


class ReleaseFile:
    """Has releases go on where they were, and keeps where they are. It is of one gateway."""

    def __init__(self, path: Path, releases: Mapping[str, Release]) -> None:
        self._path, self._releases = path, releases
        self._written = ""
        self._task: asyncio.Task[None] | None = None
        self._problem = ""
        found = read_releases(path)
        for name, release in releases.items():
            if (state := found.get(name)) is None:
                continue
            try:
                goes_on = release.go_on(state)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise _damaged(path) from None
            what = release.in_words() if goes_on else "begins anew, as its command is another"
            log.warning("release of %s: %s, after a restart (%s)", name, what, path)

    def begin(self) -> None:
        """Write now and then what has changed, on the loop that serves."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._write_again())

    def write(self) -> None:
        """Write what has changed; what cannot be written is said, and tried again."""
        states = {name: release.state() for name, release in self._releases.items()}
        text = json.dumps({"releases": states}, sort_keys=True) + "\n"
        if text == self._written:
            return
        problem = ""
        try:
            # Nobody else writes it, so that there is no lock to wait for.
            replace_file(self._path, text)
            self._written = text
        except (OSError, LLMServeError) as error:
            problem = str(error)
        if problem and problem != self._problem:
            log.warning("what is known of releases is not written: %s", problem)
        self._problem = problem

    async def _write_again(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE)
            self.write()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.write()
