"""How checks are run: what ends one of them, and what that does to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

from llmserve.errors import RequestRejectedError
from llmserve.plugin import Check
from llmserve_certify.checks import CHECKS
from llmserve_certify.checks.sharing import _leave
from llmserve_certify.endpoint import Ask, Reply
from llmserve_certify.examination import Budget
from llmserve_certify.examine import Examination, Gone, NotOffered, Refusal, Verdict, run_checks
from llmserve_certify.outcome import Broken, OutOfBudget
from llmserve_certify.page import page
from llmserve_certify.reference import Noise

from .scripted import Scripted
from .toy_server import ToyModel


def verdicts(exam: Examination, *names: str, more: Sequence[Check] = ()) -> list[Verdict]:
    checks = [check for check in CHECKS if check.name in names]
    return [*run_checks(exam, [*more, *checks]).verdicts]


def test_a_check_that_ends_with_an_error_loses_no_other() -> None:
    def wrong(exam: Examination) -> None:
        raise LookupError("no such\nplace")

    own = Check(name="own", severity="minor", promise="it is", meaning="it is not", run=wrong)
    first, second = verdicts(
        Examination(Scripted(lambda prompt, asked: " yes")), "repeatable", more=[own]
    )
    assert (first.state, second.state) == ("unfinished", "passed")
    assert first.words == "the check ends with LookupError: no such place"


def test_a_template_that_refuses_a_part_of_a_chat_is_no_reason_to_end() -> None:
    class Strict(ToyModel):
        """Has a template that takes an answer of a tool only after its call."""

        def render(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = True) -> str:
            if messages[0]["role"] == "tool":
                raise ValueError("roles must alternate")
            return super().render(messages, opened=opened) + "weather" * any(
                "tool_calls" in message for message in messages
            )

    class Talking(Scripted):
        chats = True

        def ask(self, ask: Ask) -> Reply:
            return Reply(" zzz of nobody", input_tokens=1 if ask.messages else None)

    exam = Examination(Talking(lambda prompt, asked: ""), Strict())
    (found,) = verdicts(exam, "chat-tools")
    assert found.state == "failed"
    assert "tokens there and" in found.words


def test_rounding_is_measured_only_if_a_check_asks_how_much_it_explains() -> None:
    class Measured(ToyModel):
        measured = 0

        def noise(self, precision: str, sequences: Sequence[Sequence[int]]) -> Noise:
            self.measured += 1
            return super().noise(precision, sequences)

    def answer(prompt: str, asked: int) -> str:
        return f"{prompt} yes"

    model, check = Measured(), [check for check in CHECKS if check.name == "empty-prompt"]
    # Answers that begin with their prompts are forgotten, and would be asked for once more.
    exam = Examination(Scripted(answer), model, budget=Budget(requests=11))
    report = run_checks(exam, check)
    assert (report.margin, report.requests, model.measured) == (None, 11, 0)
    assert "which explains" not in page(report)
    report = run_checks(Examination(Scripted(answer), model), CHECKS)
    assert report.margin
    assert model.measured == 1


def test_a_server_that_is_busy_says_nothing_of_an_option() -> None:
    class Busy(Scripted):
        def ask(self, ask: Ask) -> Reply:
            raise Refusal(503, "shutting down")

    with pytest.raises(Broken, match="refused \\(503\\): shutting down"):
        Examination(Busy(lambda prompt, asked: "")).offer("top_k", 1)


def test_without_the_model_a_character_that_is_no_text_is_undecided() -> None:
    exam = Examination(Scripted(lambda prompt, asked: "a\ufffdb"))
    (found,) = verdicts(exam, "unusual-text")
    assert found.state == "undecided"
    assert "only the model can say" in found.words


def test_a_value_that_is_refused_says_nothing_of_another() -> None:
    class Picky(Scripted):
        def ask(self, ask: Ask) -> Reply:
            if ask.options.get("top_k") == 0:
                raise Refusal(400, "top_k must be positive")
            return super().ask(ask)

    exam = Examination(Picky(lambda prompt, asked: " yes"))
    for _ in range(2):
        exam.offer("top_k", 1)
        with pytest.raises(NotOffered, match="must be positive"):
            exam.offer("top_k", 0)
    assert exam.asked == 2


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "set OPENAI_API_KEY"),
        (400, "--set"),
        (404, "the address, and the model's name"),
        (503, "when it has time"),
    ],
)
def test_a_refusal_of_the_first_request_has_a_hint(status: int, hint: str) -> None:
    def refuse(prompt: str, asked: int) -> str:
        raise Refusal(status, "no")

    with pytest.raises(RequestRejectedError) as found:
        run_checks(Examination(Scripted(refuse)), CHECKS)
    assert hint in str(found.value)


class Hanging(Scripted):
    """Answers, until it is told to hang; nothing that it does depends on a timeout."""

    def __init__(self, *, in_streams: bool = False) -> None:
        super().__init__(lambda prompt, asked: " yes")
        self.hangs = False
        self.end = threading.Event()
        self.in_streams = in_streams

    def _wait(self, *, streams: bool) -> None:
        if self.hangs and streams == self.in_streams:
            self.end.wait(60)

    def ask(self, ask: Ask) -> Reply:
        self._wait(streams=False)
        return super().ask(ask)

    def pieces(self, ask: Ask) -> Generator[str, None, None]:
        self._wait(streams=True)
        yield " yes"


def hanging(exam: Examination) -> None:
    assert isinstance(exam.endpoint, Hanging)
    exam.endpoint.hangs = True
    if exam.endpoint.in_streams:
        _leave(exam, exam.greedy("Hello"))
    exam.together([exam.greedy(prompt) for prompt in exam.prompts], most=2)


@pytest.mark.parametrize("in_streams", [False, True])
def test_no_wait_for_an_answer_is_longer_than_the_budget(in_streams: bool) -> None:
    endpoint = Hanging(in_streams=in_streams)
    own = Check(name="own", severity="minor", promise="it is", meaning="it is not", run=hanging)
    began = time.monotonic()
    report = run_checks(Examination(endpoint, budget=Budget(seconds=0.3)), [own, *CHECKS])
    assert time.monotonic() - began < 10
    endpoint.end.set()
    assert report.counted()["failed"] == 0
    first = report.verdicts[0]
    assert (first.state, first.words) == ("unfinished", "the budget of 0.3 seconds is used up")


def test_no_wait_between_requests_is_longer_than_the_budget() -> None:
    exam = Examination(Scripted(lambda prompt, asked: " yes"), budget=Budget(seconds=0.1))
    began = time.monotonic()
    with pytest.raises(OutOfBudget):
        exam.pause(60)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("status", [0, 404, 503])
def test_a_server_that_ends_is_one_fault(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool, status: int
) -> None:
    monkeypatch.setattr("llmserve_certify.run._WAITS", (0.0, 0.0))
    asked_after = 0

    def answer(prompt: str, asked: int) -> str:
        nonlocal asked_after
        if prompt == "kill" or (asked_after and not (comes_back and asked_after > 1)):
            asked_after += 1
            if status:
                raise Refusal(status, "no such model")
            raise Gone("no answer from it: refused")
        return " yes"

    def kills(exam: Examination) -> None:
        exam.ask(exam.greedy("kill"))

    own = Check(name="kills", severity="minor", promise="it is", meaning="it is not", run=kills)
    names = "repeatable", "empty-prompt"
    first, *others = verdicts(Examination(Scripted(answer)), *names, more=[own])
    assert first.state == "failed"
    words = f"a valid request is refused ({status}): no such model"
    assert first.words == (words if status else "no answer from it: refused")
    if comes_back:
        assert {other.state for other in others} == {"passed"}
    else:
        assert {other.state for other in others} == {"unfinished"}
        assert others[0].words == "the server no longer answers, since kills"
        assert asked_after == 3


def test_that_no_command_line_can_be_written_hides_no_failure() -> None:
    class Unwritten(Scripted):
        def curl(self, ask: Ask) -> str:
            raise TypeError("a set is no JSON")

    def fails(exam: Examination) -> None:
        raise Broken("it does not greet", got="Hm", ask=exam.greedy("Hello", stop_words={"a"}))

    own = Check(name="own", severity="minor", promise="it is", meaning="it is not", run=fails)
    (found,) = verdicts(Examination(Unwritten(lambda prompt, asked: " yes")), more=[own])
    assert (found.state, found.words, found.got) == ("failed", "it does not greet", "Hm")
    assert found.curl == ""
    assert found.notes == ("no command line can be written of the request: TypeError",)


def test_a_refusal_that_no_check_expects_is_shown_with_its_request() -> None:
    def answer(prompt: str, asked: int) -> str:
        if prompt == "rare":
            raise Refusal(400, "not today")
        return " yes"

    def asks(exam: Examination) -> None:
        exam.try_ask(exam.greedy("rare"))

    own = Check(name="own", severity="minor", promise="it is", meaning="it is not", run=asks)
    (found,) = verdicts(Examination(Scripted(answer)), more=[own])
    assert (found.state, found.got, found.curl) == ("failed", "not today", "curl")


def test_what_a_server_says_of_itself_is_asked_within_the_budget() -> None:
    class Silent(Scripted):
        def describe(self) -> dict[str, str]:
            end.wait(60)
            return {}

    end = threading.Event()
    began = time.monotonic()
    exam = Examination(Silent(lambda prompt, asked: " yes"), budget=Budget(seconds=0.3))
    assert not run_checks(exam, CHECKS).is_finished
    end.set()
    assert time.monotonic() - began < 10


def test_what_is_left_out_of_all_comparisons_is_said() -> None:
    exam = Examination(Scripted(lambda prompt, asked: f"{prompt} yes"))
    (found,) = verdicts(exam, "no-echo")
    assert found.state == "failed"
    assert found.notes == ("the prompts before the answers are left out of what is compared",)
