"""Conversations in the database of responses: what is known of each, and its items."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmserve_gateway.kept_items import Item, too_long
from llmserve_gateway.store_database import StoreDatabase
from llmserve_gateway.stored_conversations import ItemPage, PageQuery, StoredConversation
from llmserve_gateway.stored_responses import StoreLimits

_LEAST = 1000
"""What a conversation counts as that says nothing."""


class DatabaseConversations:
    """Those of one database, whose owner has room made for what is new."""

    def __init__(
        self,
        database: StoreDatabase,
        limits: StoreLimits,
        make_room: Callable[[str, str], None],
    ) -> None:
        self._database, self._limits, self._make_room = database, limits, make_room

    def add(self, conversation: StoredConversation, items: Sequence[Item]) -> None:
        metadata, now = json.dumps(dict(conversation.metadata)), time.time()
        id, owner = conversation.id, conversation.owner
        row = (id, owner, conversation.created, now, _LEAST + len(metadata), metadata)
        with self._database.writing():
            self._database.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)", row)
            self._check_room(id, items)
            self.write(owner, id, items)

    def get(self, owner: str, id: str) -> StoredConversation | None:
        found = self._database.execute(
            "SELECT created, metadata FROM conversations "
            "WHERE id = ? AND owner = ? AND touched >= ?",
            (id, owner, time.time() - self._limits.age),
        ).fetchone()
        return found and StoredConversation(id, owner, found[0], json.loads(found[1]))

    def describe(self, owner: str, id: str, metadata: Mapping[str, Any]) -> bool:
        text = json.dumps(dict(metadata))
        with self._database.writing():
            changed = self._database.execute(
                "UPDATE conversations SET metadata = ?, "
                "size = size - LENGTH(metadata) + ? WHERE id = ? AND owner = ?",
                (text, len(text), id, owner),
            )
        return changed.rowcount > 0

    def remove(self, owner: str, id: str) -> bool:
        with self._database.writing():
            query = "DELETE FROM conversations WHERE id = ? AND owner = ?"
            return self._database.execute(query, (id, owner)).rowcount > 0

    def append(self, owner: str, id: str, items: Sequence[Item]) -> bool:
        with self._database.writing():
            if not self._touch(owner, id):
                return False
            self._check_room(id, items)
            self.write(owner, id, items)
            return True

    def write(self, owner: str, id: str, items: Sequence[Item]) -> None:
        """Append items within a transaction, unless the conversation has been removed."""
        if not self._touch(owner, id):
            return
        texts = [(id, item["id"], json.dumps(dict(item))) for item in items]
        self._database.executemany(
            "INSERT INTO items (conversation, id, size, item) VALUES (?, ?, ?, ?)",
            [(id, name, len(text), text) for id, name, text in texts],
        )
        old = "DELETE FROM conversations WHERE touched < ?"
        self._database.execute(old, (time.time() - self._limits.age,))
        self._make_room(owner, id)

    def items(self, owner: str, id: str) -> list[Item] | None:
        """Return all items in their order."""
        if self.get(owner, id) is None:
            return None
        self._check_room(id)
        rows = self._database.execute(
            "SELECT item FROM items WHERE conversation = ? ORDER BY position", (id,)
        ).fetchall()
        return [json.loads(text) for (text,) in rows]

    def page(self, owner: str, id: str, query: PageQuery) -> ItemPage | None:
        if self.get(owner, id) is None:
            return None
        order, sign, start = ("DESC", "<", 2**62) if query.is_descending else ("ASC", ">", 0)
        if query.after is not None:
            found = self._database.execute(
                "SELECT position FROM items WHERE conversation = ? AND id = ?", (id, query.after)
            ).fetchone()
            if found is None:
                raise query.no_such_item()
            start = found[0]
        rows = self._database.execute(
            f"SELECT item FROM items WHERE conversation = ? AND position {sign} ? "  # noqa: S608
            f"ORDER BY position {order} LIMIT ?",
            (id, start, query.limit + 1),
        ).fetchall()
        items = [json.loads(text) for (text,) in rows]
        return ItemPage(items[: query.limit], has_more=len(items) > query.limit)

    def item(self, owner: str, id: str, name: str) -> Item | None:
        if self.get(owner, id) is None:
            return None
        found = self._database.execute(
            "SELECT item FROM items WHERE conversation = ? AND id = ?", (id, name)
        ).fetchone()
        return None if found is None else json.loads(found[0])

    def remove_item(self, owner: str, id: str, name: str) -> bool:
        with self._database.writing():
            if not self._touch(owner, id):
                return False
            query = "DELETE FROM items WHERE conversation = ? AND id = ?"
            return self._database.execute(query, (id, name)).rowcount > 0

    def _touch(self, owner: str, id: str) -> bool:
        now = time.time()
        touched = self._database.execute(
            "UPDATE conversations SET touched = ? WHERE id = ? AND owner = ? AND touched >= ?",
            (now, id, owner, now - self._limits.age),
        )
        return touched.rowcount > 0

    def _check_room(self, id: str, new: Sequence[Item] = ()) -> None:
        """Refuse a conversation that no request could go on with."""
        ((count, size),) = self._database.execute(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM items WHERE conversation = ?", (id,)
        ).fetchall()
        size += sum(len(json.dumps(dict(item))) for item in new)
        if size > self._limits.conversation or count + len(new) > self._limits.turns:
            raise too_long("conversation")
