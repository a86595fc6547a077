"""Where the hub's client keeps a model: its layout is the client's, so that others find it too."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmserve.builder.hub.listing import HubFile, Listing, is_plain
from llmserve.errors import OutputError

_PART = ".llmserve.incomplete"
"""The end of the name of a content that is not whole yet."""


@dataclass(frozen=True)
class Cache:
    """The folder of a model: ``blobs`` has contents, ``snapshots`` links to those of a commit."""

    folder: Path
    locks: Path

    @classmethod
    def of(cls, repo_id: str) -> Cache:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        root = Path(constants.HF_HUB_CACHE).expanduser().absolute()
        name = repo_folder_name(repo_id=repo_id, repo_type="model")
        return cls(root / name, root / ".locks" / name)

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def content(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.blob

    def part(self, file: HubFile) -> Path:
        """Return where a content is until it is whole."""
        return self.folder / "blobs" / f"{file.blob}{_PART}"

    def free(self) -> int | None:
        """Return how many bytes its disk has free; it need not be there yet."""
        for folder in (self.folder, *self.folder.parents):
            with suppress(OSError):
                return shutil.disk_usage(folder).free
        return None

    @contextmanager
    def locked(self, repo_id: str, report: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time download the model: the others find what it has left."""
        with self.writing():
            (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
            self.locks.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.locks / "llmserve.lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another process that downloads {repo_id}")
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:
                # Some file systems of several machines have no locks; the file is written twice.
                pass
            yield
        finally:
            os.close(handle)

    def link(self, listing: Listing, files: Iterable[HubFile]) -> None:
        """Make the files of a commit the ones that its revision has."""
        snapshot = self.snapshot(listing.commit)
        with self.writing():
            for file in files:
                pointer = snapshot / file.name
                pointer.parent.mkdir(parents=True, exist_ok=True)
                _link(self.content(file), pointer)

    def set_revision(self, listing: Listing) -> None:
        """Record what a revision is, for who asks without a connection."""
        if listing.revision == listing.commit or not is_plain(listing.revision):
            return
        path = self.folder / "refs" / listing.revision
        # What is in a cache that nobody may write to can be used all the same.
        with suppress(OSError):
            if path.is_file() and path.read_text(encoding="utf-8") == listing.commit:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.{os.getpid()}.new")
            draft.write_text(listing.commit, encoding="utf-8")
            draft.replace(path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"the cache of the hub in {self.folder.parent} cannot be written: "
                f"{error.strerror or error}",
                hint="name another folder in HF_HOME",
            ) from None


def _link(content: Path, pointer: Path) -> None:
    with suppress(FileExistsError):
        try:
            pointer.symlink_to(os.path.relpath(content, pointer.parent))
        except FileExistsError:
            raise
        except OSError:
            # Some file systems have no links.
            shutil.copyfile(content, pointer)
