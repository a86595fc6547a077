"""Where responses are kept: in a folder, or in a database that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from llmserve.errors import UsageError
from llmserve_gateway.postgresql_database import VARIABLE, PostgresqlDatabase, read_address
from llmserve_gateway.response_database import DatabaseStore
from llmserve_gateway.sqlite_database import SqliteDatabase
from llmserve_gateway.stored_responses import StoreLimits


def named_database(folder: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the database that keeps responses, if there is one, after a look."""
    if not (url := environment.get(VARIABLE, "")):
        return ""
    if folder is not None:
        problem = f"--responses and {VARIABLE} both say where responses are kept"
        raise UsageError(problem, hint="leave one of them out")
    read_address(url)
    return url


def open_store(
    folder: Path | None, database: str, limits: StoreLimits | None = None
) -> DatabaseStore | None:
    """Return what keeps responses, if anything does."""
    if database:
        return DatabaseStore(PostgresqlDatabase(database), limits)
    return DatabaseStore(SqliteDatabase(folder), limits) if folder else None
