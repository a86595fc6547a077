"""Where tests have responses kept: in a folder, or in a database of PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve_gateway.response_database import DatabaseStore
from llmserve_gateway.response_stores import open_store
from llmserve_gateway.stored_responses import StoreLimits


@dataclass(frozen=True)
class Keeping:
    """One of the two, and a folder for what else a test has."""

    folder: Path
    database: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the fields of a gateway's settings that say so."""
        if self.database:
            return {"database": self.database}
        return {"responses": self.folder / "kept"}

    def open(self, limits: StoreLimits | None = None) -> DatabaseStore:
        store = open_store(self.settings.get("responses"), self.database, limits)
        assert store is not None
        return store

    def rows(self, query: str) -> list[Any]:
        """Return what a query finds, beside all gateways."""
        if self.database:
            import psycopg

            settings = "-c search_path=llmserve"
            with psycopg.connect(self.database, options=settings) as connection:
                return connection.execute(query.encode()).fetchall()
        import sqlite3

        database = sqlite3.connect(self.folder / "kept" / "responses.sqlite3")
        try:
            return database.execute(query).fetchall()
        finally:
            database.close()
