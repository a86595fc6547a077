"""What the engine of batches makes of each answer, with a server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmserve.client.batches import jobs
from llmserve.client.batches.answers import open_answers
from llmserve.client.batches.engine import BatchEngine, BatchReply, ConnectionBrokenError
from llmserve.client.batches.jobs import BatchJob, BatchLine
from llmserve.client.batches.requests import BatchRequests
from llmserve.errors import (
    ClientError,
    LLMServeError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
)

Answer = BatchReply | LLMServeError | None


def reply(status: int, code: str = "", **headers: str) -> BatchReply:
    body: dict[str, Any] = {"choices": []}
    if code:
        body = {"error": {"message": "no", "code": code}}
    return BatchReply(status, headers, json.dumps(body).encode())


OK, BROKEN, GONE = (
    reply(200),
    ConnectionBrokenError("away", words="cut off"),
    UnreachableError("away"),
)
DIED, LATE = reply(503, "model_died"), reply(504, "timeout")


class Server:
    """Answers each model's lines by its own list, whose last answer is that of all others."""

    def __init__(self, **answers: Sequence[Answer]) -> None:
        self.answers = {model: [*found] for model, found in answers.items()}
        self.asked: list[tuple[str, int]] = []
        """The models of the lines, and how many were in flight then."""
        self.in_flight = 0
        self.looked: list[str] = []
        self.comes = self.came = False
        self.others_are_answered = True

    def room(self) -> int:
        return 4

    async def ask(self, line: BatchLine) -> BatchReply | None:
        self.in_flight += 1
        self.asked.append((line.request.model, self.in_flight))
        try:
            await asyncio.sleep(0.002)
        finally:
            self.in_flight -= 1
        answers = self.answers[line.request.model]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, LLMServeError):
            raise answer
        return answer

    async def is_ready(self, model: str) -> bool:
        self.looked.append(model)
        return len(self.looked) > 1

    async def may_come(self, model: str) -> bool:
        return self.comes

    async def has_come(self, model: str) -> bool:
        return self.came

    async def is_there(self) -> bool:
        return self.others_are_answered

    def note_answer(self) -> None: ...

    def leave(self, job: BatchJob) -> None: ...


Answered = Callable[..., dict[str, Any]]


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answered:
    """Have a server answer a line for each model; return the code of each line's error."""
    monkeypatch.setattr(jobs, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(jobs, "LONGEST_PAUSE", 0.02)

    def answer(server: Server, *models: str, patience: float | None = 60.0) -> dict[str, Any]:
        lines = (
            {"custom_id": f"{model}{n}", "url": "/v1/completions", "body": {"model": model}}
            for n, model in enumerate(models)
        )
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

        async def go() -> None:
            with (
                closing(BatchRequests(path)) as requests,
                open_answers(tmp_path / "out.jsonl", requests) as answers,
            ):
                job = BatchJob(requests, answers)
                await asyncio.wait_for(BatchEngine(server, patience=patience).answer(job), 20)

        asyncio.run(go())
        found = map(json.loads, (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines())
        return {line["custom_id"]: line["error"] and line["error"]["code"] for line in found}

    return answer


@pytest.mark.parametrize(
    ("answers", "times", "code"),
    [
        ([OK], 1, None),
        ([reply(400, "context_length_exceeded")], 1, "context_length_exceeded"),
        ([reply(500)], 1, RequestRejectedError.code),
        ([reply(429, "queue_full"), OK], 2, None),
        ([reply(429, "queue_full", **{"retry-after": "0.05"})] * 20 + [OK], 21, None),
        ([reply(502), reply(503), reply(504), reply(502), OK], 5, None),
        ([LATE, OK], 2, None),
        ([LATE], 2, "timeout"),
        ([DIED, OK], 2, None),
        ([DIED], 2, "model_died"),
        ([BROKEN, OK], 2, None),
        ([BROKEN], 2, "connection_broken"),
        ([GONE, GONE, OK], 3, None),
        ([None, None, OK], 3, None),
        ([reply(404, "model_not_found")], 1, "model_not_found"),
        ([RequestTimeoutError("no answer within 3 s")], 1, "timeout"),
        ([ClientError("no JSON", code="bad_answer")], 1, "bad_answer"),
    ],
)
def test_a_line_is_asked_as_often_as_its_answers_say(
    answered: Answered, answers: list[Answer], times: int, code: str | None
) -> None:
    # One that is answered first: then a server that breaks a connection is not itself at fault.
    server = Server(first=[OK], m=answers)
    errors = answered(server, "first", "m")
    assert errors == {"first0": None, "m1": code}
    assert [model for model, _ in server.asked].count("m") == times


def test_a_line_that_has_ended_its_model_is_asked_again_alone(answered: Answered) -> None:
    server = Server(deadly=[DIED], m=[OK])
    errors = answered(server, "deadly", *["m"] * 30)
    assert {code for name, code in errors.items() if name[0] == "m"} == {None}
    assert errors["deadly0"] == "model_died"
    second = [at for at, (model, _) in enumerate(server.asked) if model == "deadly"][1]
    assert server.asked[second] == ("deadly", 1)
    assert server.looked[:2] == ["deadly", "deadly"], "it is waited for until it is back"
    assert max(in_flight for _, in_flight in server.asked) == 4


def test_a_model_that_may_come_is_waited_for(answered: Answered) -> None:
    server = Server(m=[reply(404, "model_not_found")] * 3 + [OK])
    server.comes = True
    assert answered(server, "m") == {"m0": None}


def test_a_model_that_has_come_since_is_asked_once_more(answered: Answered) -> None:
    missing = reply(404, "model_not_found")
    server = Server(late=[missing, OK], never=[missing])
    server.came = True
    assert answered(server, "late", "never") == {"late0": None, "never1": "model_not_found"}
    assert sorted(model for model, _ in server.asked) == ["late"] * 2 + ["never"] * 2


@pytest.mark.parametrize("answer", [GONE, BROKEN])
def test_a_server_that_is_not_there_costs_no_line_and_ends_the_job_without_patience(
    answered: Answered, answer: LLMServeError, tmp_path: Path
) -> None:
    with pytest.raises(UnreachableError, match="away"):
        answered(Server(m=[answer]), *["m"] * 9, patience=0.1)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_key_that_is_refused_ends_the_job(answered: Answered) -> None:
    with pytest.raises(RequestRejectedError, match="no"):
        answered(Server(m=[reply(401, "invalid_api_key")]), *["m"] * 9)


def test_a_model_that_refuses_costs_the_patience_once(answered: Answered) -> None:
    server = Server(full=[reply(503, "model_not_loaded")], m=[OK])
    errors = answered(server, *["full"] * 20, "m", patience=0.1)
    assert errors.pop("m20") is None
    assert set(errors.values()) == {"model_not_loaded"}
    assert len(server.asked) < 60
