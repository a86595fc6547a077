"""Two servers are compared with one another: what rounding explains is no difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmserve.client import Logprob
from llmserve.errors import UsageError
from llmserve_certify.between import Comparison, Question, compare_servers, lines
from llmserve_certify.commands import FAILED, _read_questions, certify
from llmserve_certify.endpoint import Ask, Refusal, Reply
from llmserve_certify.examination import Budget, Examination

from .scripted import Scripted
from .toy_server import ToyServer


class Sure(Scripted):
    """Answers with tokens, each with its log-probability and those of others."""

    def __init__(self, *tokens: tuple[str, dict[str, float]], refuses: str = "") -> None:
        super().__init__(lambda *_: "")
        self._tokens, self._refuses = tokens, refuses

    def ask(self, ask: Ask) -> Reply:
        if self._refuses in ask.prompt and self._refuses:
            raise Refusal(400, "not that")
        entries = tuple(
            Logprob(0, token, tops[token], tuple(Logprob(0, t, p) for t, p in tops.items()))
            for token, tops in self._tokens
        )
        text = "".join(token for token, _ in self._tokens)
        return Reply(text, "length", logprobs=entries)


def between(one: Scripted, other: Scripted, *prompts: str) -> Comparison:
    ours, theirs = (
        Examination(each, precision="bfloat16", prompts=prompts or ("Hi",), budget=Budget(20))
        for each in (one, other)
    )
    return compare_servers(ours, theirs, ("a", "b"), tokens=4)


A, B = {" a": -0.5, " b": -0.7}, {" a": -0.7, " b": -0.5}
FAR_A, FAR_B = {" a": -0.1, " b": -3.0}, {" a": -3.0, " b": -0.1}
ONLY_B = {" b": -0.1, " c": -4.0}
SAME = ("The", {"The": -0.2})


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ((" a", A), (" a", B), "equal"),
        ((" a", A), (" b", B), "tie"),
        # What each finds likelier is added: a score moves from the one to the other.
        ((" a", {" a": -0.5, " b": -0.9}), (" b", {" a": -0.9, " b": -0.5}), "differs"),
        ((" a", A), (" b", FAR_B), "differs"),
        ((" a", FAR_A), (" b", FAR_B), "differs"),
        ((" a", A), (" b", ONLY_B), "differs"),
    ],
)
def test_a_difference_is_judged_by_both(
    ours: tuple[str, dict[str, float]], theirs: tuple[str, dict[str, float]], verdict: str
) -> None:
    found = between(Sure(SAME, ours), Sure(SAME, theirs))
    assert [pair.verdict for pair in found.pairs] == [verdict]
    assert found.differs == (verdict == "differs")
    (pair,) = found.pairs
    if verdict != "equal":
        assert (pair.common, pair.one.text, pair.other.text) == ("The", " a", " b")


def test_tokens_that_both_wrote_are_measured() -> None:
    found = between(Sure(("x", {"x": -1.0}), (" a", A)), Sure(("x", {"x": -1.5}), (" b", B)))
    assert (found.tokens, found.largest, found.mean) == (1, 0.5, 0.5)


def test_servers_that_say_no_likelihoods_differ_without_explanation() -> None:
    found = between(Scripted(lambda *_: "the cat"), Scripted(lambda *_: "the dog"))
    (pair,) = found.pairs
    assert (pair.verdict, pair.common) == ("unexplained", "the ")
    assert found.differs


def test_one_that_refuses_a_prompt_costs_no_other() -> None:
    found = between(Sure(SAME), Sure(SAME, refuses="bad"), "good", "bad", "fine")
    assert [pair.verdict for pair in found.pairs] == ["equal", "unanswered", "equal"]
    assert found.pairs[1].other.error == "not that"
    assert "not that" in "\n".join(lines(found))


def test_a_budget_that_ends_is_no_certificate() -> None:
    found = between(Sure(SAME), Sure(SAME), *map(str, range(40)))
    assert 0 < len(found.pairs) < 40
    assert found.differs
    assert "the budget of 20 requests is used up" in "\n".join(lines(found))


def test_what_is_shown_names_both() -> None:
    text = "\n".join(lines(between(Sure(SAME, (" a", FAR_A)), Sure(SAME, (" b", ONLY_B)))))
    assert "1 of 1 differ by more" in text
    assert "a: ' a' (18.2 times as likely" in text
    assert "b: ' b' (over 49.4 times as likely" in text


def run(*words: str) -> tuple[int | None, str, BaseException | None]:
    found = CliRunner().invoke(certify, words, standalone_mode=False)
    return found.return_value, found.stdout, found.exception


def test_the_command_compares_servers(tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("the people\n\nthere is no\n", encoding="utf-8")
    toys = ToyServer().serving(), ToyServer().serving(), ToyServer("begin-doubled").serving()
    with toys[0] as one, toys[1] as other, toys[2] as wrong:
        words = ["--prompts", str(prompts), "--json", str(report), "--precision", "float32"]
        code, text, _ = run("--between", f"toy@{one}", f"toy@{other}", *words)
        assert (code, text.splitlines()[0]) == (0, "2 of 2 equal")
        code, text, _ = run("--between", f"toy@{one}", f"toy@{wrong}", *words)
        assert code == FAILED
        assert "differ by more" in text
        pairs = json.loads(report.read_text(encoding="utf-8"))["pairs"]
        assert [pair["prompt"] for pair in pairs] == ["the people", "there is no"]


def test_a_chat_is_asked_with_all_its_messages(tmp_path: Path) -> None:
    asked: list[Ask] = []

    class Notes(Scripted):
        def ask(self, ask: Ask) -> Reply:
            asked.append(ask)
            return super().ask(ask)

    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )
    question = Question("Hi", messages)
    ours, theirs = (
        Examination(Notes(lambda *_: "Yes"), precision="bfloat16", budget=Budget(20))
        for _ in range(2)
    )
    found = compare_servers(ours, theirs, ("a", "b"), tokens=4, questions=[question])
    assert [pair.prompt for pair in found.pairs] == ["[1 messages before] Hi"]
    assert [ask.messages for ask in asked if ask.messages] == [messages, messages]
    path = tmp_path / "prompts.jsonl"
    lines_of = [{"prompt": "Hi", "messages": messages}, {"prompt": "Once"}, {"messages": [1]}]
    path.write_text("\n".join(map(json.dumps, lines_of)), encoding="utf-8")
    read = _read_questions(path)
    assert read[:2] == [question, Question("Once")]
    assert read[2].messages == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--between", "a@http://x", "b@http://y"], "--between names both servers"),
        (["--between", "a", "b@http://y"], "a is no NAME@URL"),
        (["--between", "a@http://x", "b@http://y", "--prompts", "/dev/null"], "is empty"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], message: str) -> None:
    _, _, error = run(*words)
    assert isinstance(error, UsageError)
    assert message in str(error)
