"""Responses that are kept: what requests go on from, whose they are, and how many there may be."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion
from llmserve.errors import UsageError
from llmserve_gateway.app import make_app
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key
from llmserve_gateway.stored_responses import StoredResponse, StoreLimits, new_id

from .gateways import NO_TRITON, Triton
from .keeping import Keeping

ASKED: Any = {"model": "m", "input": "Hi"}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


class Model(Triton):
    """A model that counts its answers."""

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        self.requests.append(options)
        return Completion(f"answer {len(self.requests)}", "stop", 2, 1)

    async def close(self) -> None:
        pass


class Talk:
    """A gateway that keeps responses, and starts again for each request."""

    def __init__(self, kept: Keeping, **settings: Any) -> None:
        self.triton = Model()
        self._settings = Settings(NO_TRITON, **kept.settings, **settings)

    def __call__(
        self, method: str, path: str, key: str = "", ids: Any = None, **request: Any
    ) -> Any:
        async def go() -> Any:
            app = make_app(self._settings, connect=lambda _: self.triton)  # type: ignore[arg-type,return-value]
            headers = {**(ids or {}), **({"authorization": f"Bearer {key}"} if key else {})}
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
                answer = await client.request(method, path, headers=headers, **request)
            await app.state.gateway.close()
            return answer

        return asyncio.run(go())

    def say(self, key: str = "", **body: Any) -> Any:
        answer = self("POST", "/v1/responses", key, json={**ASKED, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def last(self) -> list[tuple[str, Any]]:
        """The messages that the model was asked last."""
        return [(each["role"], each["content"]) for each in self.triton.requests[-1]["messages"]]


@pytest.fixture
def talk(kept: Keeping) -> Talk:
    return Talk(kept)


def final_of(answer: Any) -> dict[str, Any]:
    lines = [each for each in answer.text.splitlines() if each.startswith("data: ")]
    response: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))["response"]
    return response


def test_a_request_goes_on_from_a_response_after_a_restart(talk: Talk) -> None:
    first = talk.say(instructions="You help.")
    assert first["store"] is True
    second = talk.say(previous_response_id=first["id"], input="And?", instructions="Be short.")
    assert second["previous_response_id"] == first["id"]
    third = talk.say(previous_response_id=second["id"], input=[{"role": "user", "content": "So?"}])
    # Instructions are of one request.
    assert talk.last == [
        ("user", "Hi"), ("assistant", "answer 1"), ("user", "And?"), ("assistant", "answer 2"),
        ("user", "So?"),
    ]  # fmt: skip
    # Another branch of it.
    talk.say(previous_response_id=first["id"], input="Or?", instructions="Be long.")
    assert talk.last == [("system", "Be long."), ("user", "Hi"), ("assistant", "answer 1"),
                         ("user", "Or?")]  # fmt: skip
    assert len({first["id"], second["id"], third["id"]}) == 3


def test_a_streamed_response_is_kept_as_it_was_sent(talk: Talk) -> None:
    streamed = talk("POST", "/v1/responses", json={**ASKED, "stream": True})
    final = final_of(streamed)
    assert talk("GET", f"/v1/responses/{final['id']}").json() == final
    talk.say(previous_response_id=final["id"], input="And?")
    assert talk.last == [("user", "Hi"), ("assistant", "x"), ("user", "And?")]


def test_a_response_is_read_listed_and_deleted(talk: Talk) -> None:
    items = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"},
             {"role": "user", "content": [{"type": "input_text", "text": "Three"}]}]  # fmt: skip
    said = talk.say(input=items)
    path = f"/v1/responses/{said['id']}"
    assert talk("GET", path).json() == said
    listed = talk("GET", f"{path}/input_items", params={"order": "asc", "limit": 2}).json()
    assert listed["has_more"] is True
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "One"}]
    rest = talk("GET", f"{path}/input_items", params={"order": "asc", "after": listed["last_id"]})
    assert [each["content"][0]["text"] for each in rest.json()["data"]] == ["Three"]
    newest = talk("GET", f"{path}/input_items").json()
    assert newest["first_id"] == rest.json()["last_id"]
    assert talk("DELETE", path).json() == {"id": said["id"], "object": "response", "deleted": True}
    for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        assert talk(method, where).status_code == 404
    gone = talk("POST", "/v1/responses", json={**ASKED, "previous_response_id": said["id"]})
    assert gone.status_code == 400
    assert gone.json()["error"]["code"] == "previous_response_not_found"


def test_a_reference_is_to_an_item_of_an_earlier_answer(talk: Talk) -> None:
    first = talk.say()
    (item,) = first["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    talk.say(input=[{"role": "user", "content": "Hi"}, reference,
                    {"role": "user", "content": "And?"}])  # fmt: skip
    assert talk.last == [("user", "Hi"), ("assistant", "answer 1"), ("user", "And?")]
    alone = talk.say(input=[reference])
    assert talk.last == [("assistant", "answer 1")]
    # What is kept is what was meant, and not the reference.
    (kept,) = talk("GET", f"/v1/responses/{alone['id']}/input_items").json()["data"]
    assert kept == item
    for id in ("msg_1", item["id"] + "_7", f"msg_{'0' * 48}", "'; DROP TABLE responses; --"):
        unknown = {"type": "item_reference", "id": id}
        answer = talk("POST", "/v1/responses", json={**ASKED, "input": [unknown]})
        assert answer.status_code == 404, id


def test_a_request_that_stores_nothing_leaves_nothing(talk: Talk, kept: Keeping) -> None:
    said = talk.say(store=False)
    assert said["store"] is False
    assert talk("GET", f"/v1/responses/{said['id']}").status_code == 404
    assert kept.rows("SELECT COUNT(*) FROM responses") == [(0,)]


def test_a_key_sees_its_own_alone(kept: Keeping) -> None:
    file = kept.folder / "keys.json"
    mine, other = new_key(file, "mine"), new_key(file, "other")
    silent = new_key(file, "silent", stateless=True)
    talk = Talk(kept, keys=file)
    said = talk.say(mine)
    (item,) = said["output"]
    path = f"/v1/responses/{said['id']}"
    assert talk("GET", path, mine).status_code == 200
    for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        assert talk(method, where, other).status_code == 404
        assert talk(method, where).status_code == 401
    for body in (
        {"previous_response_id": said["id"]},
        {"input": [{"type": "item_reference", "id": item["id"]}]},
    ):
        answer = talk("POST", "/v1/responses", other, json={**ASKED, **body})
        assert answer.status_code in (400, 404)
    assert talk("GET", path, mine).status_code == 200
    assert talk.say(silent, store=True)["store"] is False


def test_an_id_is_not_what_a_client_chooses(talk: Talk) -> None:
    answers = [
        talk("POST", "/v1/responses", json=ASKED, ids={"x-request-id": "mine"}) for _ in range(2)
    ]
    assert [each.headers["x-request-id"] for each in answers] == ["mine", "mine"]
    ids = {each.json()["id"] for each in answers}
    assert all(len(id) == len("resp_") + 48 for id in ids)
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("body", "name"),
    [({"previous_response_id": "resp_1"}, "previous_response_id"),
     ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input")],
)  # fmt: skip
def test_a_gateway_that_keeps_none_says_so(body: Any, name: str) -> None:
    async def go(method: str, path: str, **more: Any) -> Any:
        app = make_app(Settings(NO_TRITON), connect=lambda _: Model())  # type: ignore[arg-type,return-value]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
            return await client.request(method, path, **more)

    refused = asyncio.run(go("POST", "/v1/responses", json={**ASKED, **body}))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert "keeps no responses" in refused.json()["error"]["message"]
    assert "--responses" in asyncio.run(go("GET", "/v1/responses/resp_1")).text
    assert asyncio.run(go("POST", "/v1/responses", json=ASKED)).json()["store"] is False


# The store


def stored(owner: str = "a", text: str = "x", previous: str | None = None) -> StoredResponse:
    id = new_id()
    return StoredResponse(id, owner, [{"content": text}], {"id": id, "output": []}, previous)


def test_the_folder_is_nobody_elses(tmp_path: Path) -> None:
    kept = Keeping(tmp_path)
    store = kept.open()
    store.add(stored())
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    files = list((tmp_path / "kept").iterdir())
    assert len(files) > 1
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()
    (tmp_path / "kept").chmod(0o755)
    with pytest.raises(UsageError, match="other users may read"):
        kept.open()


def test_the_oldest_of_a_key_make_place_and_no_others(kept: Keeping) -> None:
    store = kept.open(StoreLimits(bytes_per_key=10_000))
    others = stored("b")
    store.add(others)
    flood = [stored("a", "x" * 1000) for _ in range(30)]
    for each in flood:
        store.add(each)
    left = [each for each in flood if store.get("a", each.id)]
    assert left == flood[-len(left) :]
    assert 5 < len(left) < 10
    assert store.get("b", others.id) == others
    large = stored("a", "x" * 20_000)
    store.add(large)
    assert [each for each in (*flood, large) if store.get("a", each.id)] == [large]
    store.close()


def test_what_is_too_old_is_gone(kept: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept.open(StoreLimits(age=60))
    old, now = stored(text="an old secret"), time.time()
    store.add(old)
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert store.get("a", old.id) is None
    store.add(stored())
    store.close()
    assert kept.rows("SELECT COUNT(*) FROM responses") == [(1,)]
    if not kept.database:
        assert b"an old secret" not in (kept.folder / "kept" / "responses.sqlite3").read_bytes()


def test_what_was_added_is_there_after_a_kill(kept: Keeping) -> None:
    script = f"""
import os, sys
from pathlib import Path
from llmserve_gateway.response_stores import open_store
from llmserve_gateway.stored_responses import StoredResponse
store = open_store(Path({str(kept.folder / "kept")!r}), {kept.database!r})
for number in range(20):
    id = f"resp_{{number:048x}}"
    store.add(StoredResponse(id, "a", [], {{"id": id, "output": []}}))
print("added", flush=True)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout == "added\n", ended.stderr
    store = kept.open()
    assert all(store.get("a", f"resp_{number:048x}") for number in range(20))
    store.close()


def test_two_gateways_share_a_database(kept: Keeping) -> None:
    first, second = (kept.open() for _ in range(2))
    for store, other in ((first, second), (second, first)):
        each = stored()
        store.add(each)
        assert other.get("a", each.id) == each
    first.close()
    second.close()
