"""Prompts that stay warm: full pages of a cache are kept on disk, and read instead of computed.

A page is named by a digest of all that its content depends on: the model's files, how and with what
it is computed, the adapter, and all tokens up to the page's end. So no index is needed, and any
process that serves the same model in the same way finds it. Of a model with states, the state after
a page is beside it, at some of the pages: a prompt goes on after one whose state is there.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import platform
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmserve.contract.names import MANIFEST, RENEWED, WARM, WARM_BYTES
from llmserve.runtime.engine.page_files import (
    DEFAULT_LIMIT,
    NAME_BYTES,
    PageFiles,
    PageFolderError,
)
from llmserve.runtime.engine.runner import PageRunner, Runner, StatePageRunner, StateRunner
from llmserve.runtime.location import located
from llmserve.runtime.lora import ADAPTERS

LOG = logging.getLogger(__name__)

KEY_DIGEST_BYTES = 32
"""How long the digest is that is in the key of a token that stands for a part of an image."""
_MOST_WAITING = 64 << 20
"""The bytes of pages that wait to be written; what comes while there are as many is not kept."""
_MOST_USED = 10_000
"""How many texts and pages may wait until one more text is not noted as used: a disk may hang."""
_MOST_KNOWN = 200_000
_PAUSE = 60.0
"""How many seconds nothing is written after the disk has refused a page."""
_LAST = 5.0
"""How many seconds an end waits for the pages that are still to be written."""
_BYTECODE_FOLDER = "__pycache__"
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


@dataclass(frozen=True)
class _Content:
    """What is to be written: a page, or a state."""

    name: bytes
    content: bytes
    tokens: int


@dataclass(frozen=True)
class _Use:
    """The names of the pages that a text has used, and whether they are kept longer."""

    names: list[bytes]
    longer: bool


class WarmPages:
    """The pages of a runner's cache that are kept in files. One thread uses it, besides its own.

    ``model`` is a digest of all that says what the model computes, apart from adapters.
    """

    def __init__(self, runner: PageRunner, files: PageFiles, model: bytes, label: str) -> None:
        self.page_size = runner.page_size
        self.bytes_read = 0
        """Of pages that were read instead of computed."""
        self._runner, self._files, self._label = runner, files, label
        self._states = runner if isinstance(runner, StatePageRunner) else None
        # Of models that have nothing but states, pages only count tokens.
        self._has_pages = self._states is None or bool(runner.read_page(0))
        self._model = _digest(model, runner.page_form.encode(), str(runner.page_size).encode())
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Names of pages and states that are on disk, or will be."""
        self._waiting: deque[_Content | _Use] = deque()
        """What is to be written, and what a text has used."""
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._ends = self._writes = self._is_paused = False
        self._thread: threading.Thread | None = None

    def beginning(self, adapter: str, salt: str) -> bytes:
        """Return what the names of the first pages of texts are made with."""
        return _digest(self._model, adapter.encode(), salt.encode())

    def names(self, previous: bytes, keys: Sequence[int]) -> Iterator[bytes]:
        """Yield the names of the full pages of tokens that follow a page, or a beginning.

        A key is a token, or a larger number that also says of which image it is a part.
        """
        for start in range(0, len(keys) - self.page_size + 1, self.page_size):
            content = _bytes(keys[start : start + self.page_size])
            previous = hashlib.blake2b(content, key=previous, digest_size=NAME_BYTES).digest()
            yield previous

    def fill(self, name: bytes, page: int) -> bool:
        """Read a page's content, if it is on disk, instead of computing it; return whether it was.

        If not, what is in the page is of no use.
        """
        write = partial(self._runner.write_page, page)
        return not self._has_pages or self._fill(name, write)

    def has_state(self, name: bytes) -> bool:
        """Return whether the state after a page seems to be on disk."""
        return self._states is not None and self._files.exists(_of_state(name))

    def fill_state(self, name: bytes, state: int) -> bool:
        """Have a state be the one after a page, if that is on disk; return whether it was.

        If not, the state is what it was.
        """
        if self._states is None:
            return False
        return self._fill(_of_state(name), partial(self._states.write_state, state))

    def keep(self, name: bytes, page: int) -> None:
        """Have a page written in the background, if it is not on disk and not too many wait."""
        if self._has_pages:
            self._keep(name, partial(self._runner.read_page, page), self.page_size)

    def keep_state(self, name: bytes, state: int, tokens: int) -> None:
        """Have the state after a page written as well, which is so many tokens after another."""
        if self._states is not None:
            # The tokens of pages are those of the pages.
            tokens = 0 if self._has_pages else tokens
            self._keep(_of_state(name), partial(self._states.read_state, state), tokens)

    def _fill(self, name: bytes, write: Callable[[bytes], bool]) -> bool:
        content = self._files.read(name)
        if content is None or not write(content):
            self._known.pop(name, None)
            return False
        self.bytes_read += len(content)
        self._note(name)
        return True

    def _keep(self, name: bytes, read: Callable[[], bytes], tokens: int) -> None:
        # Its own thread may remove names at any time.
        with suppress(KeyError):
            self._known.move_to_end(name)
            return
        if self._waiting_bytes >= _MOST_WAITING or self._ends:
            return
        if not (content := read()):
            return
        self._note(name)
        with self._changed:
            self._waiting.append(_Content(name, content, tokens))
            self._waiting_bytes += len(content)
            self._changed.notify_all()
        self._start()

    def used(self, names: Sequence[bytes], *, longer: bool = False) -> None:
        """Note that a text with these pages was used: the least recently used ones go first, but
        after all others if they are to be kept ``longer``."""
        if names and not self._ends and len(self._waiting) < _MOST_USED:
            files = [file for name in names for file in self._files_of(name)]
            with self._changed:
                self._waiting.append(_Use(files, longer))
                self._changed.notify_all()
            self._start()

    def flush(self, seconds: float = _LAST) -> bool:
        """Wait until all that waits is written; return whether it is."""

        def is_over() -> bool:
            return self._is_paused or not (self._waiting or self._writes)

        with self._changed:
            return self._changed.wait_for(is_over, seconds) and not self._is_paused

    def close(self) -> None:
        """Write what waits, as far as that takes no time, and end."""
        if self._ends:
            return
        atexit.unregister(self.close)
        if self._thread is None:
            self._ends = True
            self._files.close()
            return
        self.flush()
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        # Its thread may still wait for a disk that answers nothing.
        self._thread.join(_LAST)
        if not self._thread.is_alive():
            self._files.close()

    def _files_of(self, name: bytes) -> Iterator[bytes]:
        """Yield the names of a page and of the state after it, as far as the model has them."""
        if self._has_pages:
            yield name
        if self._states is not None:
            yield _of_state(name)

    def _note(self, name: bytes) -> None:
        self._known[name] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="llmserve pages", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writes = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._ends)
                if self._ends:
                    return
                item, self._writes = self._waiting.popleft(), True
            if isinstance(item, _Use):
                for name in self._files.touch(item.names, longer=item.longer):
                    # Others had more use for the space; who uses it again keeps it again.
                    self._known.pop(name, None)
                continue
            is_there = self._write(item)
            with self._changed:
                self._waiting_bytes -= len(item.content)
                if not is_there:
                    # What comes meanwhile fills the queue, and is not kept then.
                    self._is_paused = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._ends, _PAUSE)
                    self._is_paused = False

    def _write(self, item: _Content) -> bool:
        """Write a page or a state; return whether it is on disk."""
        problem = "the disk is nearly full, or a page is larger than all may be"
        try:
            if self._files.write(item.name, item.content, label=self._label, tokens=item.tokens):
                return True
        except OSError as error:
            problem = str(error.strerror)
        LOG.warning("llmserve: note: pages of %s are not kept: %s", self._label, problem)
        self._known.pop(item.name, None)
        return False


def warm_pages(runner: Runner, version: Path) -> WarmPages | None:
    """Return where a model's pages are kept; None if none are: ``serve`` says whether and where.

    ``version`` is the model's version folder. A note in the log says why pages are not kept that
    should be.
    """
    if not (folder := os.environ.get(WARM)):
        return None
    label = version.parent.name
    try:
        content = (version.parent / MANIFEST).read_bytes()
        label = str(json.loads(content)["name"])
        if not isinstance(runner, PageRunner) or not runner.page_form:
            raise PageFolderError("what computes it does not give out its pages")
        if isinstance(runner, StateRunner):
            if not isinstance(runner, StatePageRunner):
                raise PageFolderError("what computes it does not give out its states")
            if not runner.most_copies:
                raise PageFolderError("no copies of its states are kept (state_mb)")
        limit = int(os.environ.get(WARM_BYTES) or DEFAULT_LIMIT)
        model = _model_digest(content, version)
        return WarmPages(runner, PageFiles(Path(folder), limit), model, label)
    except (PageFolderError, OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning("llmserve: note: prompts of %s do not stay warm: %s", label, error)
        return None


def _of_state(name: bytes) -> bytes:
    """Return the name of the state after a page."""
    return _digest(name, b"state")


def _model_digest(manifest: bytes, version: Path) -> bytes:
    """Return a digest of a model's files and of the machine that computes with them.

    The manifest has the hash of each file as it was built, and the versions of packages. A file
    that was changed since has another size or time.
    """
    places = [version]
    for component in json.loads(manifest)["components"].values():
        settings = component["settings"]
        if "path" in settings or "id" in settings:
            place = Path(located(settings, version)[0])
            places += [] if place.is_relative_to(version) else [place]
    files = [
        [place.name if place != version else "", path.relative_to(place).as_posix(), size, changed]
        for place in places
        for path, size, changed in sorted(_files_in(place))
    ]
    return _digest(manifest, json.dumps(files).encode(), _machine().encode())


def _files_in(place: Path) -> Iterator[tuple[Path, int, int]]:
    for folder, folders, names in os.walk(place, followlinks=True):
        # Adapters come and go, and are a part of the names of their own pages.
        is_top = Path(folder) == place
        left_out = (_BYTECODE_FOLDER, *([ADAPTERS] if is_top else []))
        folders[:] = [each for each in folders if each not in left_out]
        for name in names:
            if is_top and name == RENEWED:
                continue
            path = Path(folder, name)
            state = path.stat()
            yield path, state.st_size, state.st_mtime_ns


def _machine() -> str:
    """Return what a processor can compute: with other instructions, it rounds otherwise."""
    lines: set[str] = set()
    with suppress(OSError):
        text = _CPU_INFO.read_text(encoding="utf-8", errors="replace")
        lines = {line for line in text.splitlines() if line.startswith(_CPU_LINES)}
    return "\n".join([platform.machine(), *sorted(lines)])


def _bytes(keys: Sequence[int]) -> bytes:
    """Return the keys of a page as bytes, of which no others have the same."""
    if min(keys) >= 0:
        return array("q", keys).tobytes()
    # Longer ones, so that they are none of tokens alone.
    return b"".join(key.to_bytes(KEY_DIGEST_BYTES + 8, "big", signed=True) for key in keys)


def _digest(*parts: bytes) -> bytes:
    """Return a digest of parts, of which none can be taken for the end of another."""
    found = hashlib.blake2b(digest_size=NAME_BYTES)
    for part in _with_lengths(parts):
        found.update(part)
    return found.digest()


def _with_lengths(parts: Iterable[bytes]) -> Iterator[bytes]:
    for part in parts:
        yield len(part).to_bytes(8, "little")
        yield part
