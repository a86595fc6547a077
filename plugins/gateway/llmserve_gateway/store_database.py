"""What the store of responses asks of a database; its queries are the same for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Rows(Protocol):
    """What a query has found, or changed."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class StoreDatabase(Protocol):
    """A database that has the tables, and knows which of its gateways live.

    A value is ``?`` in a query. What goes wrong is a ``StoreError``.
    """

    own: str
    """By which word other gateways know this one."""

    def execute(self, query: str, values: Sequence[Any] = ()) -> Rows: ...
    def executemany(self, query: str, values: Iterable[Sequence[Any]]) -> None: ...

    def writing(self) -> AbstractContextManager[None]:
        """Have all of what is written in the block, or nothing; others write before or after it."""

    def is_there(self, gateway: str) -> bool:
        """Return whether a gateway lives."""

    def close(self) -> None: ...
