"""A file that a client uploads, written to disk as it arrives."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from llmserve.client import in_thread
from llmserve_gateway.batches.folder import Folder
from llmserve_gateway.batches.multipart import Form, Part
from llmserve_gateway.batches.records import EXPIRY, StoredFile, read_expiry
from llmserve_gateway.bodies import (
    ClientDisconnected,
    Receive,
    check_length,
    discard,
    refuse,
)
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import STRING, Body, Field, check_mapping

MAX_BYTES = 200 << 20
"""The size of a file."""
MAX_STORED = 4 << 30
"""The size of all files of a key."""
MAX_FILES = 10_000
"""Of a key."""
UPLOAD_SECONDS = 600.0
_OVERHEAD = 64 << 10
_MAX_FIELD = 1 << 10
_MAX_NAME = 255
_CHUNK = 1 << 20


def _file(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"the form has no {name}", name)
    return value


def _purpose(value: Any, name: str) -> str:
    if value != "batch":
        what = f"{name} must be batch, not {str(value)[:40]!r}: files are for batches here"
        raise bad_request(what, name)
    return str(value)


def _expiry(value: Any, name: str) -> int:
    kept = check_mapping(value, name)
    return read_expiry(kept.get("anchor"), kept.get("seconds"), name)


_FILE: Field[str] = Field(
    "file", "The requests, one in a line.", _file, {**STRING, "format": "binary"}, required=True
)
_PURPOSE: Field[str] = Field(
    "purpose", "What the file is for.", _purpose, {"const": "batch"}, required=True
)
_EXPIRES: Field[int] = Field("expires_after", "How long the file is kept.", _expiry, EXPIRY)
UPLOAD = Body(_FILE, _PURPOSE, _EXPIRES)
"""A form, whose fields come one after the other."""


async def read_upload(
    receive: Receive, headers: Mapping[str, str], owner: str, folder: Folder
) -> StoredFile:
    """Read a form with a file and its purpose, and keep the file."""
    form = Form(headers.get("content-type", ""))
    await check_length(receive, headers, MAX_BYTES + _OVERHEAD, _too_large())
    try:
        left = room_left(folder, owner)
        name, content = await in_thread(folder.begin_file, owner)
    except (ApiError, OSError) as error:
        await refuse(receive, headers, storage_error(error))
    upload = _Upload(form, content, left)
    try:
        try:
            await asyncio.wait_for(upload.read(receive), UPLOAD_SECONDS)
        except ApiError:
            if not upload.is_whole:
                await discard(receive)
            raise
        form.end()
        file = upload.described(name, owner)
        await in_thread(folder.end_file, file, content)
        folder.add(file)
        return file
    except asyncio.TimeoutError:
        raise ApiError(408, f"the file did not arrive within {UPLOAD_SECONDS:g} s") from None
    except OSError as error:
        raise storage_error(error) from None
    finally:
        with suppress(OSError):
            content.close()
        await in_thread(folder.drop_partial, owner, name)


def room_left(folder: Folder, owner: str) -> int:
    """Return how many bytes a key may have more; refuse one that may have no other file."""
    if len(folder.files.of(owner)) >= MAX_FILES:
        what = f"this key has {MAX_FILES} files: delete some"
        raise ApiError(413, what, code="storage_full")
    left = MAX_STORED - folder.used(owner)
    if left <= 0:
        raise _full()
    return left


class _Upload:
    def __init__(self, form: Form, content: BinaryIO, left: int) -> None:
        self._form = form
        self._content = content
        self._left = left
        self._buffer = bytearray()
        self._size = 0
        self.is_whole = False
        """Whether all of the body has arrived."""
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._field: str | None = None
        """The field that is being read, None if it is the file."""

    async def read(self, receive: Receive) -> None:
        received = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body = message.get("body", b"")
            self.is_whole = not message.get("more_body")
            received += len(body)
            if received > MAX_BYTES + _OVERHEAD:
                raise _too_large()
            for found in self._form.feed(body):
                self._begin(found) if isinstance(found, Part) else self._add(found)
            if len(self._buffer) >= _CHUNK or self.is_whole:
                await in_thread(self._content.write, bytes(self._buffer))
                self._buffer.clear()
            if self.is_whole:
                return

    def described(self, name: str, owner: str) -> StoredFile:
        """Return what is known of the file now; raise if a field is missing or wrong."""
        filename = _FILE.read(self._filename)[-_MAX_NAME:]
        purpose = _PURPOSE.read(self._text(_PURPOSE.name))
        now, expires = int(time.time()), None
        kept = _EXPIRES.name
        if any(field.startswith(kept) for field in self._fields):
            parts = {part: self._text(f"{kept}[{part}]") for part in ("anchor", "seconds")}
            expires = now + _EXPIRES.read(parts)
        return StoredFile(name, owner, filename, self._size, purpose, now, expires)

    def _text(self, name: str) -> str:
        return self._fields.get(name, b"").decode("utf-8", errors="replace")

    def _begin(self, part: Part) -> None:
        if part.name == "file":
            if self._filename is not None:
                raise bad_request("the form has more than one file", "file")
            self._filename, self._field = part.filename or "file", None
        else:
            self._field = part.name[:_MAX_FIELD]
            self._fields[self._field] = bytearray()

    def _add(self, data: bytes) -> None:
        if self._field is not None:
            field = self._fields[self._field]
            field += data
            if len(field) > _MAX_FIELD:
                raise bad_request(f"a field of the form is over {_MAX_FIELD} bytes")
            return
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise _too_large()
        if self._size > self._left:
            raise _full()
        self._buffer += data


def _full() -> ApiError:
    what = f"the files of this key would be over {MAX_STORED >> 30} GB: delete some"
    return ApiError(413, what, code="storage_full")


def _too_large() -> ApiError:
    what = f"the file is over {MAX_BYTES >> 20} MB: divide it"
    return ApiError(413, what, code="request_too_large")


def storage_error(error: ApiError | OSError) -> ApiError:
    """Return what to say when a file or a batch cannot be kept, or deleted."""
    if isinstance(error, ApiError):
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "the disk of the gateway is full", code="storage_full")
    return ApiError(500, f"the gateway cannot use its folder: {error.strerror}")
