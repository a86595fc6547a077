"""Releases through the gateway's own application: who is answered by what, and what is seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.client import Completion, Logprob, ModelInfo, Piece, ToolCall, Tools
from llmserve.errors import ConfigError, ModelDiedError, UsageError
from llmserve_gateway.admission import Limits
from llmserve_gateway.batches.asking import Asking
from llmserve_gateway.gateway import Gateway, Settings
from llmserve_gateway.keys import new_key
from llmserve_gateway.releases.comparison import Heard, compare
from llmserve_gateway.releases.conformance import conforms, what_is_wrong
from llmserve_gateway.releases.release import (
    PAIRS,
    Plan,
    Release,
    Tolerances,
    read_plans,
    read_tolerances,
)

from .gateways import NO_TRITON, app_before

GOOD = '{"city": "Paris"}'
SCHEMA = json.dumps(
    {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
)
CHAT = "/v1/chat/completions"
Answers = Callable[[int], "str | Exception"]


def scored(text: str, sure: float = 3.0) -> tuple[Logprob, ...]:
    """Return a token for each character, each likelier than the others by so much."""
    others = "xyPQ{i"
    return tuple(
        Logprob(0, c, 0.0, (Logprob(0, c, 0.0), *(Logprob(1, o, -sure) for o in others if o != c)))
        for c in text
    )


class TwoBuilds:
    """A Triton with two models, each with answers of its own to the first and to later requests."""

    def __init__(self, new: Answers, old: Answers = lambda _: GOOD, sure: float = 3.0) -> None:
        self.answers: dict[str, Answers] = {"old": old, "new": new}
        self.asked = {"old": 0, "new": 0}
        self.waiting: asyncio.Event | None = None
        """If set, what the new build is asked waits for it."""
        self.sure = sure
        self.tokens = {"old": 5, "new": 5}
        self.fingerprints: dict[str, str] = {}

    async def models(self) -> list[str]:
        return ["old", "new"]

    async def model_ready(self, name: str) -> bool:
        return name in self.answers

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        tensors: Any = dict.fromkeys(("text_input", "text_output", "logprobs", "json_schema"))
        return ModelInfo(
            name, "stream", True, None, tensors, tensors, "0.1",
            fingerprint=self.fingerprints.get(name, ""),
        )  # fmt: skip

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        number = self.asked[name] = self.asked[name] + 1
        if self.waiting is not None and name == "new":
            await self.waiting.wait()
        answer = self.answers[name](number)
        if isinstance(answer, Exception):
            raise answer
        logprobs = scored(answer, self.sure) if options.get("logprobs") is not None else None
        return Completion(answer, "stop", self.tokens[name], 3, logprobs=logprobs)

    async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
        whole = await self.generate(name, prompt, **options)
        yield Piece(whole.text, input_tokens=5, output_tokens=3, logprobs=whole.logprobs)
        yield Piece("", finish_reason="stop")

    @property
    def all(self) -> Sequence[Any]:
        return []

    async def close(self) -> None:
        pass


class Served:
    """A gateway in front of two builds, within one event loop."""

    def __init__(self, triton: TwoBuilds, plan: str, kind: str = "canary", **settings: Any) -> None:
        shadows, canaries = ([plan], []) if kind == "shadow" else ([], [plan])
        given = Settings(NO_TRITON, releases=tuple(read_plans(shadows, canaries)), local=True,
                         **settings)  # fmt: skip
        app = app_before(triton, given)
        self.gateway: Gateway = app.state.gateway
        transport = httpx.ASGITransport(app=app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    @property
    def release(self) -> Release:
        return self.gateway.releases.of["old"]

    async def ask(self, user: str = "", times: int = 1, **fields: Any) -> list[httpx.Response]:
        body = {"model": "old", "messages": [{"role": "user", "content": "secret?"}], **fields}
        body |= {"user": user} if user else {}
        found = []
        for _ in range(times):
            found.append(await self.client.post(CHAT, json=body))
            await self.gateway.releases.background.wait()
        return found


def served(triton: TwoBuilds, plan: str, use: Any, kind: str = "canary", **settings: Any) -> Any:
    async def go() -> Any:
        gateway = Served(triton, plan, kind, **settings)
        async with gateway.client:
            result = await use(gateway)
        await gateway.gateway.releases.close()
        return result

    return asyncio.run(go())


JSON = {"response_format": {"type": "json_schema", "json_schema": {"schema": json.loads(SCHEMA)}}}


def test_a_build_that_is_as_good_is_promoted() -> None:
    async def use(at: Served) -> None:
        replies = await at.ask(times=120)
        assert {reply.status_code for reply in replies} == {200}
        assert {reply.json()["model"] for reply in replies} == {"old"}
        assert at.release.stage == "promoted"
        assert at.release.compared < 120
        before = dict(triton.asked)
        await at.ask(times=5)
        # Nothing more is compared, and the old build has nothing to do any more.
        assert triton.asked == {"old": before["old"], "new": before["new"] + 5}

    served(triton := TwoBuilds(lambda _: GOOD), "old=new:100%", use)


BROKEN: Mapping[str, tuple[Answers, Mapping[str, Any], str]] = {
    "answers": (lambda n: "{" if n % 4 == 0 else GOOD, JSON, "not in the form"),
    "empty": (lambda n: "" if n % 4 == 0 else GOOD, {}, "empty"),
    "errors": (lambda n: ModelDiedError("gone") if n % 4 == 0 else GOOD, {}, "error"),
    "differs": (lambda _: "I" + GOOD, {"temperature": 0}, "more than rounding"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["canary", "shadow"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_build_that_is_worse_is_returned_and_says_why(name: str, stream: bool, kind: str) -> None:
    answers, fields, why = BROKEN[name]

    async def use(at: Served) -> None:
        replies = await at.ask(times=200, stream=stream, **fields)
        assert {reply.status_code for reply in replies} == {200}
        assert at.release.stage == "returned"
        assert why in at.release.why
        before = triton.asked["new"]
        await at.ask(times=5)
        assert triton.asked["new"] == before

    served(triton := TwoBuilds(answers), "old=new:100%", use, kind)


def test_another_prompt_is_seen_of_sampled_answers_too() -> None:
    """A template that is another one makes other tokens of the same messages."""

    async def use(at: Served) -> None:
        triton.tokens["new"] = 9
        await at.ask(times=60, temperature=1)
        assert at.release.stage == "returned"
        assert "its prompt has 9 tokens, that of the other 5" in str(at.release.to_json())

    served(triton := TwoBuilds(lambda _: GOOD), "old=new:100%", use, "shadow")


def test_what_rounding_explains_is_no_fault() -> None:
    async def use(at: Served) -> None:
        await at.ask(times=150, temperature=0)
        assert at.release.stage == "promoted", at.release.why
        assert at.release.evidence["differs"].seen > 0

    served(TwoBuilds(lambda _: "x" + GOOD, sure=0.3), "old=new:100%", use)


def test_a_request_that_the_new_build_fails_is_answered_by_the_old_one() -> None:
    async def use(at: Served) -> None:
        for stream in (False, True):
            (reply,) = await at.ask(stream=stream)
            assert reply.status_code == 200
            assert "Paris" in reply.text
        assert at.release.saved == 2
        assert triton.asked == {"old": 2, "new": 2}
        # A key counts it once.

    served(triton := TwoBuilds(lambda _: ModelDiedError("gone")), "old=new:100%", use)


def test_a_user_always_meets_the_same_build_and_a_larger_share_moves_nobody_back() -> None:
    async def use(at: Served) -> None:
        users = [f"user{number}" for number in range(40)]

        async def moved() -> set[str]:
            found = set()
            for user in users:
                before = at.release.requests["new"]
                await at.ask(user)
                found |= {user} if at.release.requests["new"] > before else set()
            return found

        first = await moved()
        assert 0 < len(first) < 40
        assert await moved() == first
        reply = await at.client.post("/releases/promote", json={"model": "old", "share": 0.6})
        assert reply.json()["share"] == 0.6
        second = await moved()
        assert first < second
        reply = await at.client.post("/releases/promote", json={"model": "old", "share": 0.1})
        assert reply.status_code == 409
        assert (await at.client.post("/releases/abort", json={"model": "old"})).status_code == 200
        assert await moved() == set()

    served(TwoBuilds(lambda _: GOOD), "old=new:30%", use)


def test_a_shadow_harms_nobody() -> None:
    """Its answers are thrown away, nobody waits for it, and it gets nothing while others wait."""

    async def use(at: Served) -> None:
        triton.waiting = asyncio.Event()
        body = {"model": "old", "messages": [{"role": "user", "content": "Hi"}]}
        post = at.client.post
        replies = await asyncio.wait_for(
            asyncio.gather(*(post(CHAT, json=body) for _ in range(30))), 20
        )
        assert {reply.json()["choices"][0]["message"]["content"] for reply in replies} == {GOOD}
        # A few wait, and no more are kept.
        assert triton.asked["new"] <= 1
        assert len(at.gateway.releases.background._tasks) <= 8
        await asyncio.wait_for(at.gateway.releases.close(), 2)
        assert at.release.compared == 0
        assert at.release.dropped > 0
        assert not at.gateway.releases.background.reserve()

    limits = Limits(max_requests=2)
    served(triton := TwoBuilds(lambda _: ""), "old=new:100%", use, "shadow", limits=limits)


def test_what_a_shadow_answers_is_not_kept_as_the_users_response(tmp_path: Path) -> None:
    async def use(at: Served) -> None:
        sent = {"model": "old", "input": "Hi"}
        answer = (await at.client.post("/v1/responses", json=sent)).json()
        await at.gateway.releases.background.wait()
        kept = (await at.client.get(f"/v1/responses/{answer['id']}")).json()
        assert kept["output"] == answer["output"]
        assert kept["output"][0]["content"][0]["text"] == GOOD

    triton = TwoBuilds(lambda _: "another answer")
    served(triton, "old=new:100%", use, "shadow", responses=tmp_path)
    assert triton.asked == {"old": 1, "new": 1}


def test_a_shadow_keeps_the_prompts_of_a_key_apart_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    salts: dict[str, set[str | None]] = {"old": set(), "new": set()}

    class Salted(TwoBuilds):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            salts[name].add(options.get("cache_salt"))
            return await super().generate(name, prompt, **options)

    secrets = [new_key(keys, user) for user in ("ann", "bob")]

    async def use(at: Served) -> None:
        for secret in secrets:
            at.client.headers["authorization"] = f"Bearer {secret}"
            await at.ask()

    served(Salted(lambda _: GOOD), "old=new:100%", use, "shadow", keys=keys, warm_scope="key")
    assert salts["new"] == salts["old"]
    assert len(salts["old"] - {None}) == 2


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_user_who_waits_for_a_slot_has_that_of_the_shadow(has_batches: bool) -> None:
    async def use(at: Served) -> None:
        if has_batches:
            # Those make room as well, since they began.
            Asking(at.gateway, app_before(triton))
        triton.waiting = asyncio.Event()
        body = {"model": "old", "messages": [{"role": "user", "content": "Hi"}]}
        await at.client.post(CHAT, json=body)
        await asyncio.sleep(0.05)
        assert at.gateway.admission.beside == 1
        # The only slot is taken by what nobody waits for.
        reply = await asyncio.wait_for(at.client.post(CHAT, json=body), 5)
        assert reply.status_code == 200
        assert at.release.dropped == 1

    limits = Limits(max_requests=1)
    served(triton := TwoBuilds(lambda _: GOOD), "old=new:100%", use, "shadow", limits=limits)


def test_a_key_for_the_old_build_meets_the_new_one_and_only_operators_see_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.json"
    alice = new_key(path, "alice", models=["old"])
    boss = new_key(path, "boss", operator=True)

    async def use(at: Served) -> None:
        def headers(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        body = {"model": "old", "messages": [{"role": "user", "content": "secret?"}]}
        reply = await at.client.post(CHAT, json=body, headers=headers(alice))
        assert (reply.status_code, triton.asked["new"]) == (200, 1)
        refused = await at.client.post(CHAT, json={**body, "model": "new"}, headers=headers(alice))
        assert refused.status_code == 403
        assert (await at.client.get("/releases", headers=headers(alice))).status_code == 403
        assert (await at.client.get("/releases")).status_code == 401
        told = await at.client.get("/releases", headers=headers(boss))
        assert told.json()["releases"][0]["requests"] == {"old": 0, "new": 1}
        assert "secret" not in told.text
        page = (await at.client.get("/metrics", headers=headers(boss))).text
        assert 'llmserve_release_requests{build="new",model_name="old"} 1.0' in page

    served(triton := TwoBuilds(lambda _: GOOD), "old=new:100%", use, keys=path)


def test_texts_are_kept_only_if_asked_for_and_have_an_end() -> None:
    times = [0.0]
    heard, other = Heard([Completion("aha", "stop", 1, 1)]), Heard([Completion("oh", "stop", 1, 1)])
    for keep, seen in ((0.0, False), (60.0, True)):
        release = Release(Plan("shadow", "a", "b", 1), Tolerances(), keep_texts=keep,
                          clock=lambda: times[0])  # fmt: skip
        release.note(compare({}, heard, other, 1.0, greedy=False), heard, other, "secret")
        for word in ("aha", "oh", "secret"):
            assert (word in json.dumps(release.to_json())) is seen
        times[0] += 61
        assert not {"aha", "secret"} & {*json.dumps(release.to_json()).split('"')}


def test_of_many_pairs_those_are_kept_that_show_something() -> None:
    release = Release(Plan("shadow", "a", "b", 1), Tolerances())
    fine, bad = Heard([Completion("x", "stop", 1, 1)]), Heard([Completion("", "stop", 1, 1)])
    for number in range(50):
        new = bad if number == 40 else fine
        release.note(compare({}, fine, new, 1.0, greedy=False), fine, new)
    pairs = release.pairs()
    assert len(pairs) == PAIRS
    assert [pair.said for pair in pairs if pair.is_worse] == [["it is empty"]]


def restarted(
    path: Path, plan: str, use: Any, new: Answers = lambda _: GOOD, build: str = "n1", **more: Any
) -> Any:
    """Serve a release as a gateway does that is started (again) with this file."""
    triton = TwoBuilds(new)
    triton.fingerprints["new"] = build
    return served(triton, plan, use, release_file=path, **more)


def test_a_build_that_was_returned_meets_nobody_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "releases.json"

    async def break_it(at: Served) -> None:
        await at.ask(times=60)
        assert at.release.stage == "returned"
        assert "returned" in path.read_text(encoding="utf-8"), "at once, whatever comes"

    restarted(path, "old=new:100%", break_it, lambda _: "")

    async def after(at: Served) -> int:
        await at.ask(times=5)
        triton: Any = at.gateway.client
        assert (at.release.stage, at.release.why[:6]) == ("returned", "answer")
        return int(triton.asked["new"])

    assert restarted(path, "old=new:100%", after) == 0
    assert "secret" not in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o077 == 0

    async def another(at: Served) -> None:
        await at.ask()
        assert (at.release.stage, at.release.requests["new"]) == ("watched", 1)

    restarted(path, "old=new:100%", another, build="n2")


def test_evidence_and_share_go_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "releases.json"
    compared: list[int] = []

    async def some(at: Served) -> None:
        if not compared:
            at.release.promote(1.0 - 1e-9)
        await at.ask(times=60)
        compared.append(at.release.compared)
        assert at.release.share > 0.9, "what an operator has raised"

    restarted(path, "old=new:50%", some)
    restarted(path, "old=new:50%", some)
    assert compared[0] == 60
    assert 60 < compared[1] < 120, "it was promoted by the evidence of both"

    async def look(at: Served) -> str:
        return f"{at.release.stage} {at.release.compared} {at.release.share:.1f}"

    assert restarted(path, "old=new:50%", look) == f"promoted {compared[1]} 1.0"
    # What was seen of another kind of release, or with another tolerance, is no evidence here.
    assert restarted(path, "old=new:50%", look, kind="shadow") == "watched 0 0.5"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"releases": []}', '{"releases": {"old": {}}}', '{"releases": {"old": 1}}']
)
def test_a_file_that_says_nothing_of_releases_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "releases.json"
    path.write_text(text, encoding="utf-8")
    plans = tuple(read_plans([], ["old=new"]))
    with pytest.raises(ConfigError, match="does not say what is known of releases"):
        Gateway(Settings(NO_TRITON, releases=plans, release_file=path))
    with pytest.raises(ConfigError, match=r"there is no folder .*gone for r\.json"):
        Gateway(Settings(NO_TRITON, releases=plans, release_file=tmp_path / "gone/r.json"))


def test_a_release_goes_on_with_what_it_had() -> None:
    (plan,) = read_plans([], ["a=b:20%"])
    one, other = Release(plan, Tolerances()), Release(plan, Tolerances())
    for number in range(50):
        one.evidence["answers"].add(number % 7 == 0, number % 11 == 0)
    one.promote(0.5)
    kept = json.loads(json.dumps(one.state()))
    assert other.go_on(kept)
    assert other.state() == one.state()
    assert other.evidence["answers"].chance_if_fine == one.evidence["answers"].chance_if_fine
    (wider,) = read_plans([], ["a=b:30%"])
    again = Release(wider, Tolerances())
    assert again.go_on(kept)
    assert again.share == 0.3, "who writes another share wants that"
    for wrong in ({"stage": "fine"}, {"share": 0}, {"compared": -1}, {"builds": ["x"]}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Release(plan, Tolerances()).go_on(kept | wrong)
    for part in ({"seen": -1}, {"worse": [0.0]}, {"sum": float("nan")}, {"verdict": "good"}):
        evidence = dict(kept["evidence"])
        evidence["answers"] = evidence["answers"] | part
        with pytest.raises(ValueError, match="no evidence"):
            Release(plan, Tolerances()).go_on(kept | {"evidence": evidence})


def test_a_build_that_takes_twice_as_long_is_returned() -> None:
    release = Release(Plan("canary", "a", "b", 0.5), Tolerances())
    for number in range(200):
        release.note_rate(1.0 + number % 7 / 50, 10, new=False)
        release.note_rate(2.0, 10, new=True)
    assert (release.stage, "half as long again" in release.why) == ("returned", True)


@pytest.mark.parametrize(
    ("answer", "options", "wrong"),
    [
        (Completion("x", "stop"), {}, ""),
        (Completion("  ", "stop"), {}, "it is empty"),
        (Completion("", "length"), {}, ""),
        (Completion("", "stop", reasoning="hm"), {}, ""),
        (Completion(GOOD, "stop"), {"json_schema": SCHEMA}, ""),
        (Completion('{"city"', "stop"), {"json_schema": SCHEMA}, "it is no JSON"),
        (Completion('{"city"', "length"), {"json_schema": SCHEMA}, ""),
        (Completion("{}", "stop"), {"json_schema": SCHEMA}, "it is not as its schema says"),
        (Completion("[1]", "stop"), {"json_object": True}, "it is no JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_answer(
    answer: Completion, options: Mapping[str, Any], wrong: str
) -> None:
    assert what_is_wrong(answer, options) == wrong


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": {}, **parameters}}


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(0, arguments, "id", name)


LOOK_UP = tool("look_up", properties={"city": {"type": "string"}}, required=["city"])
RIGHT = call("look_up", GOOD)


@pytest.mark.parametrize(
    ("calls", "asked", "wrong"),
    [
        ([RIGHT], {}, ""),
        ([RIGHT, RIGHT], {}, ""),
        ([call("look_up", "[1]")], {}, "the arguments of 'look_up' are no JSON object"),
        ([call("look_up", "{}")], {}, "the arguments of 'look_up' are not as its schema says"),
        ([call("look_up", '{"city": 1}')], {},
         "the arguments of 'look_up' are not as its schema says"),
        ([call("other")], {}, ""),
        ([call("third")], {}, "it calls 'third', which is no tool of its request"),
        ([call("other")], {"named": "look_up"},
         "it calls 'other', which is no tool of its request"),
        ([], {}, ""),
        ([], {"choice": "required"}, "it calls no tool, and its request says that it must"),
        ([RIGHT, RIGHT], {"parallel": False},
         "it has several calls, and its request allows one"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_calls_of_tools(
    calls: list[ToolCall], asked: dict[str, Any], wrong: str
) -> None:
    tools = Tools((LOOK_UP, tool("other")), **asked)
    answer = Completion("" if calls else "Hm.", "tool_calls", tool_calls=tuple(calls))
    assert what_is_wrong(answer, {}, tools) == wrong
    assert what_is_wrong(replace(answer, finish_reason="length"), {}, tools) == ""
    options, right = {"temperature": 0}, Completion("", "tool_calls", tool_calls=(RIGHT,))
    found = compare(options, Heard([right]), Heard([answer]), 1.0, greedy=False, tools=tools)
    assert found.failed["answers"] == (bool(wrong), False)
    assert wrong in "".join(found.said)


@pytest.mark.parametrize(
    ("value", "schema", "conforming"),
    [
        (1, {"type": "integer"}, True),
        (1.0, {"type": "integer"}, True),
        (True, {"type": "integer"}, False),
        (None, {"type": ["string", "null"]}, True),
        ({"a": 1}, {"properties": {"a": {"enum": [2]}}}, False),
        ({"a": 1}, {"properties": {}, "additionalProperties": False}, False),
        ([1, "a"], {"items": {"type": "integer"}}, False),
        # What is not understood is no reason to blame an answer.
        ("x", {"$ref": "#/$defs/number"}, True),
        ("x", {"type": "decimal"}, True),
        (1, {"const": 2}, False),
        (1, False, False),
        (float("inf"), {"type": "integer"}, False),
    ],
)
def test_a_value_and_a_schema(value: Any, schema: Any, conforming: bool) -> None:
    assert conforms(value, schema) is conforming


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["m"], "names no new build"),
        (["m=m"], "names no new build"),
        (["m=n:0%"], "is no share"),
        (["m=n:101%"], "is no share"),
        (["m=n:x"], "is no share"),
        (["m=n", "m=o"], "a release of m already"),
        (["m=n", "n=o"], "is released and has a release"),
    ],
)
def test_a_release_that_makes_no_sense_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_plans(words[:1], words[1:])


def test_what_is_tolerated_is_said() -> None:
    found = read_tolerances(["errors=2%", "slow=off", "logits=3", "cut=0"])
    assert found.of["errors"].allowed == 0.02
    assert found.of["errors"].fault == pytest.approx(0.06)
    assert found.of["cut"].allowed == 0
    assert "slow" not in found.of
    assert found.explained == 3
    for words in (["speed=1%"], ["errors=x"], ["errors=100%"]):
        with pytest.raises(UsageError):
            read_tolerances(words)
