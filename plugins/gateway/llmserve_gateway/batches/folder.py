"""The folder that keeps files and batches; the names in it are ours, never a client's."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from llmserve.errors import UsageError
from llmserve_gateway.batches.records import Batch, StoredFile, new_id
from llmserve_gateway.errors import ApiError

log = logging.getLogger("llmserve.gateway")

_R = TypeVar("_R", StoredFile, Batch)

EVERYONE = "everyone"
"""Whose files they are if the gateway has no keys."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OWNER = re.compile(rf"{EVERYONE}|[0-9a-f]{{64}}")
_RECORD = re.compile(r"(file-|batch_)[0-9a-f]{32}\.json")
_DATA = re.compile(r"file-[0-9a-f]{32}")
_ANSWERS = re.compile(r"(batch_[0-9a-f]{32})\.answers")
_PARTIAL, _HIDDEN = ".part", ".file-"


def check_folder(path: Path, option: str = "--batches") -> None:
    """Make the folder, or refuse one that others can read or that is none."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except FileExistsError:
        raise UsageError(f"{path} is not a folder", hint=f"name another with {option}") from None
    except OSError as error:
        problem = f"{path} cannot be used: {error.strerror}"
        raise UsageError(problem, hint=f"name another folder with {option}") from None
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to another user", hint=f"name another with {option}")
    if status.st_mode & _OTHERS:
        problem = f"other users may read {path}, and with it the requests of all keys"
        raise UsageError(problem, hint=f"chmod 700 {path}")


class Shelf(Generic[_R]):
    """Records of one kind: nobody who asks for those of an owner sees, or waits for, others."""

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[str, _R]] = {}

    def add(self, record: _R) -> None:
        self._by_owner.setdefault(record.owner, {})[record.id] = record

    def forget(self, record: _R) -> None:
        own = self._by_owner.get(record.owner, {})
        own.pop(record.id, None)
        if not own:
            self._by_owner.pop(record.owner, None)

    def get(self, owner: str, name: str) -> _R | None:
        return self._by_owner.get(owner, {}).get(name)

    def of(self, owner: str) -> list[_R]:
        return list(self._by_owner.get(owner, {}).values())

    def all(self) -> list[_R]:
        return [record for own in self._by_owner.values() for record in own.values()]


class Folder:
    """Files and batches; one gateway at a time has it.

    Its shelves are changed on the event loop alone; what writes to the disk may run in a thread.
    """

    def __init__(self, path: Path) -> None:
        check_folder(path)
        self._path = path
        self.files = Shelf[StoredFile]()
        self.batches = Shelf[Batch]()
        self._saving = threading.Lock()
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            problem = f"another gateway keeps its batches in {path}"
            raise UsageError(problem, hint="give each gateway a folder of its own") from None
        self._load()

    def close(self) -> None:
        os.close(self._lock)

    def file(self, owner: str, name: str) -> StoredFile:
        found = self.files.get(owner, name)
        if found is None:
            raise ApiError(404, f"there is no file {name[:80]!r}", code="not_found")
        return found

    def batch(self, owner: str, name: str) -> Batch:
        found = self.batches.get(owner, name)
        if found is None:
            raise ApiError(404, f"there is no batch {name[:80]!r}", code="not_found")
        return found

    def add(self, record: StoredFile | Batch) -> None:
        if isinstance(record, Batch):
            self.batches.add(record)
        else:
            self.files.add(record)

    def forget(self, record: StoredFile | Batch) -> None:
        if isinstance(record, Batch):
            self.batches.forget(record)
        else:
            self.files.forget(record)

    def used(self, owner: str) -> int:
        """Return how many bytes the files of a key have."""
        return sum(file.bytes for file in self.files.of(owner))

    def data(self, file: StoredFile) -> Path:
        return self._of(file.owner) / file.id

    def results(self, batch: Batch) -> tuple[Path, Path]:
        """Return the files of the answers and of the errors of a batch."""
        folder = self._of(batch.owner)
        return folder / batch.output_id, folder / batch.error_id

    def answers(self, batch: Batch) -> Path:
        """Return the file to which the answers of a running batch are appended."""
        return self._of(batch.owner) / f"{batch.id}.answers"

    def begin_file(self, owner: str) -> tuple[str, BinaryIO]:
        """Return the id of a new file, and what its content is written to."""
        name = new_id("file-")
        path = self._of(owner) / (name + _PARTIAL)
        return name, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def drop_partial(self, owner: str, name: str) -> None:
        (self._of(owner) / (name + _PARTIAL)).unlink(missing_ok=True)

    def end_file(self, file: StoredFile, content: BinaryIO) -> None:
        """Keep a file whose content is written."""
        content.flush()
        os.fsync(content.fileno())
        partial = self.data(file).with_name(file.id + _PARTIAL)
        partial.replace(self.data(file))
        try:
            self.save(file)
        except OSError:
            self.data(file).unlink()
            raise

    def save(self, record: StoredFile | Batch) -> None:
        path = self._of(record.owner) / f"{record.id}.json"
        partial = path.with_name(f"{new_id(path.name + '.')}{_PARTIAL}")
        # The last who writes has read the record last.
        try:
            with self._saving:
                with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.write(json.dumps(asdict(record)).encode())
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
        except OSError:
            # It is tried again for a day.
            partial.unlink(missing_ok=True)
            raise

    def delete(self, record: StoredFile | Batch) -> None:
        """Delete a file, or a batch, whose results are files of their own."""
        folder = self._of(record.owner)
        content = self.answers(record) if isinstance(record, Batch) else self.data(record)
        for path in (folder / f"{record.id}.json", content):
            path.unlink(missing_ok=True)

    def _of(self, owner: str) -> Path:
        folder = self._path / owner
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _load(self) -> None:
        for folder in self._path.iterdir():
            if folder.is_dir() and _OWNER.fullmatch(folder.name):
                self._load_owner(folder)

    def _load_owner(self, folder: Path) -> None:
        paths = list(folder.iterdir())
        for path in paths:
            if _RECORD.fullmatch(path.name):
                self._load_record(folder.name, path)
        known = {path.stem for path in paths if path.suffix == ".json"}
        batches = self.batches.of(folder.name)
        known |= {name for b in batches if b.is_unfinished for name in b.result_ids}
        for path in paths:
            is_lost = bool(_DATA.fullmatch(path.name)) and path.name not in known
            if match := _ANSWERS.fullmatch(path.name):
                batch = self.batches.get(folder.name, match[1])
                is_lost = match[1] not in known if batch is None else not batch.is_unfinished
            # What an interrupted upload has left, or a batch that was to have its results.
            if is_lost or path.name.endswith(_PARTIAL) or path.name.startswith(_HIDDEN):
                path.unlink()

    def _load_record(self, owner: str, path: Path) -> None:
        kind: Callable[..., StoredFile | Batch] = Batch if path.name[0] == "b" else StoredFile
        try:
            record = kind(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read and is left out: %s", path, str(error)[:200])
            return
        if (record.owner, f"{record.id}.json") != (owner, path.name):
            log.warning("%s is of another key or has another name, and is left out", path)
        else:
            self.add(record)
