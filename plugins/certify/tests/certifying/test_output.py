"""What a report is written as, and the command that writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from llmserve.errors import (
    OutputError,
    PluginError,
    RequestRejectedError,
    UnreachableError,
    UsageError,
)
from llmserve.plugin import Check, Registry
from llmserve_certify.commands import certify
from llmserve_certify.examine import Broken, Examination, Report, run_checks
from llmserve_certify.openai import OpenAIEndpoint
from llmserve_certify.output import as_json, as_junit, change_lines, changes, read_states
from llmserve_certify.page import page
from llmserve_certify.run import all_checks
from llmserve_certify.verdict import Verdict

from .toy_server import ToyServer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ToyServer("reason-always-stop").serving() as url:
        yield url


def verdict(name: str, state: str, **others: object) -> Verdict:
    return Verdict(name, state, "major", "it holds", "users lose", **others)  # type: ignore[arg-type]


def report(*verdicts: Verdict) -> Report:
    subject = {"model": "m<1>", "at": "http://x/v1", "api": "OpenAI API"}
    return Report(subject, None, "float32", verdicts, 7, 1.5, date="2026-01-01T00:00:00+00:00")


BAD = verdict(
    "a",
    "failed",
    words="<b>it\u0000 breaks",
    expected="</pre>",
    got="\x1b[31m",
    curl="curl -s 'x&y'",
)


def test_a_page_needs_nothing_else_and_escapes_what_a_server_says() -> None:
    html = page(report(BAD, verdict("b", "passed")), [])
    assert "http-equiv" not in html
    assert "src=" not in html
    assert "<b>it" not in html.replace("<b>&lt;b&gt;it", "")
    assert "&lt;/pre&gt;" in html
    assert "1 checks failed" in html
    assert "<td>nothing</td><td>has changed</td>" in html


def test_junit_is_xml_whatever_a_server_says() -> None:
    root = ElementTree.fromstring(as_junit(report(BAD, verdict("b", "skipped", words="not here"))))
    assert root.attrib["failures"] == "1"
    first, second = root
    assert first[0].tag == "failure"
    assert "curl" in (first[0].text or "")
    assert second[0].tag == "skipped"


@pytest.mark.parametrize(
    ("states", "title", "words"),
    [
        (("passed", "skipped"), "certified", "1 checks passed, none failed, 1 skipped"),
        (("passed", "unfinished"), "not finished", "not finished: 1 checks passed, none failed"),
        (("skipped", "undecided"), "not finished", "not finished: 0 checks passed"),
        (("failed", "unfinished"), "faults", "1 unfinished"),
    ],
)
def test_only_what_was_decided_is_certified(
    states: tuple[str, ...], title: str, words: str
) -> None:
    made = report(*(verdict(str(number), state) for number, state in enumerate(states)))
    assert f"<title>m&lt;1&gt;: {title}</title>" in page(made)
    assert words in page(made)
    root = ElementTree.fromstring(as_junit(made))
    assert len(root.findall("*/error")) == int(root.attrib["errors"]) == states.count("unfinished")


def test_a_baseline_tells_what_has_changed(tmp_path: Path) -> None:
    before = report(verdict("a", "passed"), verdict("b", "failed"), verdict("c", "passed"))
    file = tmp_path / "before.json"
    file.write_text(as_json(before), encoding="utf-8")
    now = report(BAD, verdict("b", "passed"), verdict("d", "passed"))
    found = changes(read_states(file), now)
    assert [(c.name, c.before, c.after, c.is_worse) for c in found] == [
        ("a", "passed", "failed", True),
        ("b", "failed", "passed", False),
        ("d", None, "passed", False),
        ("c", "passed", None, False),
    ]
    file.write_text("{}")
    with pytest.raises(UsageError):
        read_states(file)


def test_a_failure_that_was_known_does_not_explain_another_that_is_new() -> None:
    now = report(BAD, verdict("b", "failed", cause="a"))
    (found,) = changes({"a": "failed", "b": "passed"}, now)
    assert (found.name, found.is_worse) == ("b", True)
    worse = {c.name: c.is_worse for c in changes({"a": "passed", "b": "passed"}, now)}
    assert worse == {"a": True, "b": False}


def test_what_was_not_run_both_times_is_only_counted() -> None:
    now = report(verdict("a", "passed"), verdict("b", "failed"), verdict("c", "failed"))
    changed = changes({"a": "failed", "d": "passed", "e": "failed", "c": "failed"}, now)
    assert change_lines(changed) == [
        ("a", "was failed, now passed"),
        ("b", "was not run, now failed"),
        ("2 checks", "were not run this time"),
    ]
    assert change_lines(changes({}, report(verdict("a", "passed")))) == [
        ("1 checks", "were not run before")
    ]


def test_that_the_budget_ends_a_check_is_no_change() -> None:
    now = report(verdict("a", "unfinished"), verdict("b", "unfinished"), verdict("c", "failed"))
    (found,) = changes({"a": "passed", "c": "unfinished"}, now)
    assert (found.name, found.is_worse) == ("c", True)


def test_halves_of_characters_are_written_as_escapes() -> None:
    half = "\ud83d"
    made = report(verdict("a", "failed", words=half, got=half, curl=half, notes=(half,)))
    made.subject["version"] = half  # type: ignore[index]
    for text in (page(made), as_json(made), as_junit(made)):
        text.encode()
        assert "\\ud83d" in text
    assert json.loads(as_json(made))["verdicts"][0]["got"] == half


def test_a_failure_that_another_explains_is_no_fault_of_its_own() -> None:
    explained = verdict("b", "failed", cause="a")
    assert report(BAD, explained).faults == [BAD]


def test_the_worst_fault_is_the_first() -> None:
    minor = Verdict("m", "failed", "minor", "", "")
    critical = Verdict("c", "failed", "critical", "", "")
    assert [v.name for v in report(minor, BAD, critical).faults] == ["c", "a", "m"]


def run(url: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        certify, ["toy", "--openai", url, *arguments], standalone_mode=False
    )
    if result.exception:
        raise result.exception
    return result.return_value, result.output


def test_the_command_writes_what_it_is_asked_for(url: str, tmp_path: Path) -> None:
    only = ("--only", "finish-reason", "--only", "temperature")
    files = ("--junit", str(tmp_path / "j.xml"), "--json", str(tmp_path / "r.json"))
    code, output = run(url, *only, *files, "--report", str(tmp_path / "page"))
    assert code == 8
    assert "finish-reason: an answer that max_tokens cuts" in output
    assert "curl -s" in output
    assert ElementTree.parse(tmp_path / "j.xml").getroot().attrib["tests"] == "2"
    assert "finish-reason" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    # A fault that is known already fails nobody's build.
    code, output = run(url, *only, "--baseline", str(tmp_path / "r.json"))
    assert code == 0
    assert "nothing has changed" in output


def test_files_that_cannot_be_written_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    for name in ("--json", "--junit", "--report"):
        (tmp_path / "file").write_text("kept", encoding="utf-8")
        wrong = tmp_path / "file" / "r" if name == "--report" else tmp_path / "none" / "r"
        with pytest.raises(UsageError, match=r"r cannot be written: .* directory"):
            run("http://127.0.0.1:1/v1", name, str(wrong))
    # Nothing is left of a file that could be written, if then no server answers.
    with pytest.raises(UnreachableError):
        run(
            "http://127.0.0.1:1/v1",
            "--json",
            str(tmp_path / "r"),
            "--junit",
            str(tmp_path / "file"),
        )
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"
    assert not (tmp_path / "r").exists()
    with pytest.raises(UnreachableError):
        run("http://127.0.0.1:1/v1", "--report", str(tmp_path / "page"))
    assert not (tmp_path / "page").exists()


def test_the_place_of_each_file_of_a_page_is_tried_first(tmp_path: Path) -> None:
    (tmp_path / "page" / "report.json").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"report\.json cannot be written: Is a directory"):
        run("http://127.0.0.1:1/v1", "--report", str(tmp_path / "page"))


def test_two_reports_in_one_file_are_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "r")
    with pytest.raises(UsageError, match="name the same file"):
        run("http://127.0.0.1:1/v1", "--json", place, "--junit", place)


def test_a_report_that_cannot_be_written_at_the_end_loses_no_other(
    url: str, tmp_path: Path
) -> None:
    # There is room for nothing in it, which shows only when it is written to.
    (tmp_path / "r.json").symlink_to("/dev/full")
    files = ("--json", str(tmp_path / "r.json"), "--junit", str(tmp_path / "j.xml"))
    with pytest.raises(OutputError, match=r"r\.json \(No space left on device\) cannot be written"):
        run(url, "--only", "temperature", *files, "--report", str(tmp_path / "deep" / "page"))
    assert ElementTree.parse(tmp_path / "j.xml").getroot().attrib["tests"] == "1"
    assert {path.name for path in (tmp_path / "deep" / "page").iterdir()} == {
        "index.html",
        "report.json",
    }


def test_a_report_is_saved_though_nobody_reads_what_is_printed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("llmserve_certify.commands._print", closed)
    with pytest.raises(BrokenPipeError):
        run(url, "--only", "temperature", "--json", str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["verdicts"]


def test_an_option_is_sent_with_every_request(url: str) -> None:
    code, output = run(url, "--only", "finish-reason", "--set", "top_k=5")
    assert code == 8
    assert '"top_k": 5' in output


def test_a_server_that_refuses_a_plain_request_may_need_an_option(url: str) -> None:
    with pytest.raises(RequestRejectedError, match=r"min_p must be between .* with --set"):
        run(url, "--set", "min_p=7")


def test_the_budget_is_kept(url: str) -> None:
    code, output = run(url, "--budget", "30", "--json", "-", "--only", "own-answer")
    content = json.loads(output[output.index("{") :])
    assert code == 8
    assert content["requests"] <= 30
    assert content["verdicts"][0]["state"] == "unfinished"
    assert "budget" in content["verdicts"][0]["words"]


def test_a_run_that_decides_nothing_is_no_success(url: str) -> None:
    code, output = run(url, "--only", "greedy-is-the-models")
    assert code == 8
    assert "not finished: 0 checks passed, none failed, 1 skipped" in output


def test_a_server_that_does_not_answer_is_no_fault_of_a_check() -> None:
    with ToyServer().serving() as gone:
        pass
    with pytest.raises(UnreachableError):
        run(gone)


def test_a_budget_that_is_too_small_to_begin_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        run(url, "--budget", "1")


@pytest.mark.parametrize("budget", ["none", "0", "-1", "5x"])
def test_a_budget_that_is_none_is_refused(url: str, budget: str) -> None:
    with pytest.raises(Exception, match="give requests"):
        run(url, "--budget", budget)


def test_a_misspelt_check_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="finish-reason"):
        run(url, "--only", "finish-reasn")


def test_a_plugin_adds_a_check(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def greets(exam: Examination) -> None:
        ask = exam.greedy("Hello", 8)
        raise Broken("it does not greet", got=exam.ask(ask).text, ask=ask)

    own = Check(name="greets", severity="minor", promise="it greets", meaning="rude", run=greets)
    added: list[object] = [own]
    monkeypatch.setattr(Registry, "implementations", lambda self, hook: [("acme", lambda: added)])
    checks = all_checks(Registry(()))
    assert checks[-1] is own
    result = run_checks(Examination(OpenAIEndpoint(url, "toy")), [own])
    assert result.faults[0].words == "it does not greet"
    for wrong in (own, "no check"):
        added[1:] = [wrong]
        with pytest.raises(PluginError):
            all_checks(Registry(()))
