"""What the hub has of a model: one commit of it, with its files and their sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.builder.hub.failures import (
    not_understood,
    reading_answer,
    requesting,
    token,
    try_again,
)

COMMIT = re.compile(r"[0-9a-f]{40}")
_GITS = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"\w[\w.-]{0,127}")
_SEPARATED = re.compile(r"[\\:\x00-\x1f\x7f]")


@dataclass(frozen=True)
class HubFile:
    """A file of a commit.

    ``blob`` is what its content is called in the cache. If that ``is_hash``, it is the hash of the
    content: SHA-256 or, of a small file, git's. Some mirrors list neither that nor the size.
    """

    name: str
    size: int | None = None
    blob: str = ""
    is_hash: bool = True


@dataclass(frozen=True)
class Listing:
    """The files of one commit of a model."""

    repo_id: str
    revision: str
    commit: str
    files: Mapping[str, HubFile]


def ask(
    repo_id: str,
    revision: str = "",
    *,
    timeout: float | None = None,
    report: Callable[[str], None] | None = None,
) -> Listing:
    """Ask the hub which commit a revision is now, and which files that has.

    With ``report``, a hub that has too much to do is asked again.
    """
    with requesting(repo_id, revision), reading_answer(repo_id):
        from huggingface_hub import HfApi, constants

        def look() -> Any:
            return HfApi(token=token()).model_info(
                repo_id,
                revision=revision or None,
                files_metadata=True,
                timeout=timeout or constants.HF_HUB_ETAG_TIMEOUT,
            )

        info = try_again(look, repo_id, report) if report else look()
        if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
            raise not_understood(repo_id)
        listed = [_file(each) for each in info.siblings or () if is_plain(each.rfilename)]
        files = {file.name: file for file in listed}
        return Listing(repo_id, revision or constants.DEFAULT_REVISION, info.sha, files)


def newest_commit(repo_id: str, revision: str = "", *, timeout: float) -> str | None:
    """Return the commit that the hub has now; None if it does not answer at once."""
    try:
        from huggingface_hub import HfApi

        info = HfApi(token=token()).model_info(repo_id, revision=revision or None, timeout=timeout)
    except Exception:
        # Whatever the reason: a model that is here can be used without the hub.
        return None
    return str(info.sha) if info.sha else None


def with_content(listing: Listing, file: HubFile) -> HubFile:
    """Ask for what a mirror has not listed of a file: its size, and a name for its content."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    with requesting(listing.repo_id, listing.revision, file.name):
        found = get_hf_file_metadata(
            hf_hub_url(listing.repo_id, file.name, revision=listing.commit),
            token=token(),
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    # It becomes the name of a file.
    if not _NAME.fullmatch(found.etag or ""):
        raise not_understood(listing.repo_id)
    # Where the length of an answer is not known, some say 0.
    return HubFile(file.name, found.size or None, found.etag, is_hash=False)


def _file(described: Any) -> HubFile:
    large = described.lfs
    blob = str(large.sha256 if large else described.blob_id)
    size = large.size if large else described.size
    if not (_SHA256 if large else _GITS).fullmatch(blob) or type(size) is not int or size < 0:
        return HubFile(described.rfilename)
    return HubFile(described.rfilename, size, blob)


def is_plain(name: Any) -> bool:
    """Return whether this is the name of a file in a folder, or in folders of it, and no other."""
    if not isinstance(name, str) or len(name) > 1000 or _SEPARATED.search(name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
