"""The endpoints of files and batches, in OpenAI's format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from llmserve.client import BATCH_ENDPOINTS
from llmserve_gateway.batches.folder import EVERYONE, Folder
from llmserve_gateway.batches.records import (
    EXPIRY,
    Batch,
    StoredFile,
    new_id,
    read_expiry,
    read_window,
)
from llmserve_gateway.batches.runner import Runner
from llmserve_gateway.batches.uploads import (
    UPLOAD_SECONDS,
    read_upload,
    room_left,
    storage_error,
)
from llmserve_gateway.bodies import read_json
from llmserve_gateway.connections import note_upload
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import STRING, Body, Field, check_mapping
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import json_response

MAX_UNFINISHED = 20
"""Batches of one key."""
MAX_UPLOADS = 4
"""At a time, of one key."""
_MAX_METADATA, _MAX_NAME, _MAX_VALUE = 16, 64, 512
_FILES, _BATCHES = (10_000, 10_000), (20, 100)
"""How many entries a page of a list has, and at most."""


def _endpoint(value: Any, name: str) -> str:
    if value not in BATCH_ENDPOINTS:
        raise bad_request(f"{name} must be one of {', '.join(BATCH_ENDPOINTS)}", name)
    return str(value)


def _file_id(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{name} must be the id of a file", name)
    return value


def _window(value: Any, name: str) -> tuple[str, int]:
    del name
    text = value if isinstance(value, str) else ""
    return text, read_window(text)


def _metadata(value: Any, name: str) -> dict[str, str]:
    is_valid = (
        isinstance(value, dict)
        and len(value) <= _MAX_METADATA
        and all(
            len(name) <= _MAX_NAME and isinstance(text, str) and len(text) <= _MAX_VALUE
            for name, text in value.items()
        )
    )
    if not is_valid:
        what = f"{name} has at most {_MAX_METADATA} texts, of {_MAX_VALUE} characters each"
        raise bad_request(what, name)
    return dict(value)


def _expiry(value: Any, name: str) -> int | None:
    kept = check_mapping(value, name)
    return read_expiry(kept.get("anchor"), kept.get("seconds"), name) if kept else None


_INPUT_FILE: Field[str] = Field(
    "input_file_id", "The file of requests.", _file_id, STRING, required=True
)
_ENDPOINT: Field[str] = Field(
    "endpoint", "The endpoint that all requests are for.", _endpoint,
    {"enum": [*BATCH_ENDPOINTS]}, required=True,
)  # fmt: skip
_WINDOW: Field[tuple[str, int]] = Field(
    "completion_window", "The time in which to answer, such as 24h.", _window,
    {**STRING, "pattern": "^[1-9][0-9]*[mhd]$"}, required=True,
)  # fmt: skip
_METADATA: Field[dict[str, str] | None] = Field(
    "metadata", "Texts of your own.", _metadata,
    {"type": "object", "maxProperties": _MAX_METADATA,
     "additionalProperties": {**STRING, "maxLength": _MAX_VALUE}},
)  # fmt: skip
_KEPT: Field[int | None] = Field(
    "output_expires_after", "How long the answers are kept.", _expiry, EXPIRY
)
NEW_BATCH = Body(_INPUT_FILE, _ENDPOINT, _WINDOW, _METADATA, _KEPT)


class BatchRoutes:
    """The endpoints of a gateway that may have no folder for batches."""

    def __init__(self, runner: Runner | None) -> None:
        self._runner = runner
        self._uploads: Counter[str] = Counter()

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            what = "this gateway keeps no files and has no batches: start it with --batches FOLDER"
            raise ApiError(404, what, code="not_found")
        return self._runner

    @property
    def folder(self) -> Folder:
        return self.runner.folder

    async def files(self, request: Request, key: Key | None) -> Response:
        if request.method == "POST":
            return json_response((await self._upload(request, _owner(key))).as_json())
        purpose = request.query_params.get("purpose")
        files = self.folder.files.of(_owner(key))
        wanted = [file for file in files if purpose in (None, file.purpose)]
        return _page(request.query_params, wanted, _FILES)

    async def _upload(self, request: Request, owner: str) -> StoredFile:
        folder = self.folder
        if self._uploads[owner] >= MAX_UPLOADS:
            raise ApiError(429, f"{MAX_UPLOADS} uploads of this key are running", code="queue_full")
        self._uploads[owner] += 1
        try:
            note_upload(request.scope, UPLOAD_SECONDS)
            return await read_upload(request.receive, request.headers, owner, folder)
        finally:
            self._uploads[owner] -= 1

    async def file(self, request: Request, key: Key | None) -> Response:
        file = self.folder.file(_owner(key), request.path_params["id"])
        if request.method != "DELETE":
            # A route of GET answers HEAD too.
            return json_response(file.as_json())
        if self.runner.is_read(file):
            what = "a batch that is not finished reads this file: cancel it first"
            raise ApiError(400, what, code="file_in_use")
        await _kept(self.runner.delete(file))
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request, key: Key | None) -> Response:
        file = self.folder.file(_owner(key), request.path_params["id"])
        headers = {"x-content-type-options": "nosniff", "content-security-policy": "sandbox"}
        return FileResponse(
            self.folder.data(file), media_type="application/octet-stream", headers=headers
        )

    async def batches(self, request: Request, key: Key | None) -> Response:
        runner, owner = self.runner, _owner(key)
        if request.method == "POST":
            content = await read_json(request.receive, request.headers)
            return json_response((await self._begin(content, owner)).as_json())
        found = self.folder.batches.of(owner)
        for batch in found:
            runner.count(batch)
        return _page(request.query_params, found, _BATCHES)

    async def _begin(self, content: Mapping[str, Any], owner: str) -> Batch:
        batch = self._new_batch(content, owner)
        if sum(batch.is_unfinished for batch in self.folder.batches.of(owner)) >= MAX_UNFINISHED:
            what = f"{MAX_UNFINISHED} batches of this key are not finished: wait for one of them"
            headers = {"x-should-retry": "false"}
            raise ApiError(429, what, code="too_many_batches", headers=headers)
        # Its results will be files of the key too.
        room_left(self.folder, owner)
        await _kept(self.runner.add(batch))
        return batch

    async def batch(self, request: Request, key: Key | None) -> Response:
        batch = self.folder.batch(_owner(key), request.path_params["id"])
        self.runner.count(batch)
        return json_response(batch.as_json())

    async def cancel(self, request: Request, key: Key | None) -> Response:
        batch = self.folder.batch(_owner(key), request.path_params["id"])
        if not batch.is_unfinished:
            raise bad_request(f"the batch is {batch.status}, and cannot be cancelled")
        await _kept(self.runner.cancel(batch))
        return await self.batch(request, key)

    def _new_batch(self, content: Mapping[str, Any], owner: str) -> Batch:
        values = NEW_BATCH.read(content)
        file = values[_INPUT_FILE]
        try:
            source = self.folder.file(owner, file)
        except ApiError as error:
            raise bad_request(error.message, "input_file_id", "not_found") from None
        (window, seconds), now = values[_WINDOW], int(time.time())
        return Batch(
            id=new_id("batch_"),
            owner=owner,
            endpoint=values[_ENDPOINT],
            input_file_id=source.id,
            completion_window=window,
            created_at=now,
            expires_at=now + seconds,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            metadata=values[_METADATA],
            keep_seconds=values[_KEPT],
        )


def _owner(key: Key | None) -> str:
    """Return whose files a key sees; the name of a key may be given to another one later."""
    return key.sha256 if key else EVERYONE


async def _kept(change: Awaitable[None]) -> None:
    """Make a change in the folder, or say why that is not possible."""
    try:
        await change
    except OSError as error:
        raise storage_error(error) from None


def _page(
    query: Mapping[str, str],
    entries: Sequence[StoredFile | Batch],
    sizes: tuple[int, int],
) -> Response:
    """Return a part of a list, the newest first, as the query wants it."""
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc", "order")
    by_age: Callable[[Any], Any] = lambda entry: (entry.created_at, entry.id)  # noqa: E731
    ordered = sorted(entries, key=by_age, reverse=order == "desc")
    if after is not None:
        ids = [entry.id for entry in ordered]
        if after not in ids:
            raise bad_request(f"after: there is no {after[:80]!r} in this list", "after")
        ordered = ordered[ids.index(after) + 1 :]
    size = sizes[0]
    if limit is not None:
        size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 6 else 0
        if not 1 <= size <= sizes[1]:
            raise bad_request(f"limit must be 1 to {sizes[1]}", "limit")
    page = ordered[:size]
    return json_response(
        {
            "object": "list",
            "data": [entry.as_json() for entry in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(ordered) > size,
        }
    )
