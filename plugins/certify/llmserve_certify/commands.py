"""The command ``certify``.

What loads numpy, gRPC or torch is imported only when it is needed, so that ``--help`` responds at
once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.commands import (
    Status,
    asks_a_server,
    assigned,
    built_models,
    check_file,
    check_folder,
    print_table,
    printable,
)
from llmserve.errors import OutputError, UsageError
from llmserve.plugin import Check, Registry, locate_adapter, near
from llmserve_certify.endpoint import Subject
from llmserve_certify.examination import PROMPTS, Budget, Examination
from llmserve_certify.output import (
    Change,
    as_json,
    as_junit,
    change_lines,
    changes,
    evidence,
    read_states,
)
from llmserve_certify.page import page, result
from llmserve_certify.run import Report, all_checks, checks_for, run_checks
from llmserve_certify.verdict import Verdict

if TYPE_CHECKING:
    from llmserve_certify.between import Question

PRECISIONS = ("float32", "bfloat16", "float16", "int8", "int4")
FAILED = 8
"""The exit code if a check fails, or is not finished."""
_MINUTES = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_UNITS = {"s": 1, "m": 60, "h": 3600}
_FILE = click.Path(dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_PAGE, _REPORT = "index.html", "report.json"


def _budget(_: click.Context, __: click.Parameter, text: str) -> Budget:
    budget = Budget()
    for part in filter(None, text.split(",")):
        if part.isdecimal() and int(part):
            budget.requests = int(part)
        elif match := _MINUTES.fullmatch(part):
            budget.seconds = float(match[1]) * _UNITS[match[2]]
        else:
            raise click.BadParameter("give requests, minutes or both, as in 300 or 300,5m")
    return budget


@click.command()
@click.argument("model", required=False, shell_complete=built_models)
@click.option(
    "--against",
    metavar="SOURCE",
    help="The model itself, to compare with: a folder, a hub id, a GGUF file or 'demo'.",
)
@click.option(
    "--between",
    nargs=2,
    metavar="NAME@URL NAME@URL",
    help="Compare two servers with one another, of which each has OpenAI's API at an address with "
    "http, or is a Triton.",
)
@click.option(
    "--prompts",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='With --between: a file with a prompt in each line, or JSON lines of {"prompt": …} or '
    '{"messages": […]}.',
)
@click.option("--chat", is_flag=True, help="With --between: send each prompt as a chat message.")
@click.option(
    "--tokens",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="With --between: the most tokens of an answer.",
)
@click.option(
    "--adapter",
    metavar="NAME[=FOLDER]",
    help="Check this adapter of the model; with --against, a folder or a hub id that has it too.",
)
@asks_a_server
@click.option(
    "--embeddings", is_flag=True, help="With --openai: check v1/embeddings; a Triton tells it."
)
@click.option("--http-url", help="Triton's HTTP address, for the curl commands in the report.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Send an option with every request, such as one that the model needs (repeatable).",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="What the server computes in (default: what the model's weights are stored in).",
)
@click.option("--quick", is_flag=True, help="Only the most telling checks, in a sixth of the time.")
@click.option(
    "--only", multiple=True, metavar="CHECK", help="Only this check (repeatable); see --list."
)
@click.option("--list", "as_list", is_flag=True, help="List the checks, and ask nothing.")
@click.option(
    "--budget",
    callback=_budget,
    default="1500,20m",
    show_default=True,
    metavar="REQUESTS,TIME",
    help="The most requests, and the longest time.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 10**6, min_open=True),
    default=120.0,
    show_default=True,
    help="Of one request.",
)
@click.option("--report", type=_FOLDER, metavar="DIR", help="Write a page to this folder.")
@click.option(
    "--json", "json_file", type=_OUT, metavar="FILE", help="Save the report as JSON; - prints it."
)
@click.option("--junit", type=_FILE, metavar="FILE", help="Save the report as JUnit's XML.")
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="An earlier report in JSON: say what has changed, and fail only for what is worse.",
)
def certify(model: str | None, as_list: bool, **options: Any) -> int:
    """Check a server against its model.

    What it answers should be what the model says. Any server: a model of a Triton with text
    tensors, or one with OpenAI's API. With --against, answers are compared with the model's own,
    run on this machine; without, with one another. A difference that rounding explains is no
    fault, and is said. The exit code is 8 if there are faults, or if the budget ended it early.

    \b
    llmserve certify demo --against demo
    llmserve certify my-model --openai http://127.0.0.1:8000/v1 --against ./my-model
    llmserve certify demo --quick --junit certify.xml
    llmserve certify --between old@127.0.0.1:8001 new@http://127.0.0.1:8000/v1
    """
    if options["between"]:
        return _between(model, options)
    checks = _chosen(all_checks(Registry.load(components=False)), options["only"])
    if as_list:
        _print_checks(checks)
        return 0
    if model is None:
        raise UsageError("MODEL is missing", hint="name a served model, or give --list")
    before = read_states(options["baseline"]) if options["baseline"] else None
    _check_places(options)
    with Status("connecting") as status, _examination(model, options, status) as exam:
        # What is asked for by its name is run, whatever --quick leaves out.
        exam.quick = options["quick"] and not options["only"]
        count = len(checks_for(exam, checks))
        started = iter(range(1, count + 1))

        def start(check: Check) -> None:
            status.update(f"{next(started)} of {count}: {check.name}")

        report = run_checks(exam, checks, on_start=start)
    changed = None if before is None else changes(before, report)
    _write(report, changed, options)
    worse = report.faults if changed is None else [c for c in changed if c.is_worse]
    return FAILED if worse or not report.is_finished else 0


def _between(model: str | None, options: dict[str, Any]) -> int:
    from llmserve_certify.between import Question, compare_servers, lines

    others = ("against", "adapter", "url", "openai")
    if model is not None or any(options[name] for name in others):
        hint = "give two times NAME@URL, and no MODEL, --against, --adapter, --url or --openai"
        raise UsageError("--between names both servers", hint=hint)
    _check_places(options)
    path = options["prompts"]
    questions = _read_questions(path) if path else [*map(Question, PROMPTS)]
    names = options["between"]
    with ExitStack() as stack:
        status = stack.enter_context(Status("connecting"))
        one, other = (
            Examination(
                stack.enter_context(_named(name, options)),
                precision=options["precision"] or "",
                budget=replace(options["budget"]),
                prompts=[question.text for question in questions],
            )
            for name in names
        )
        found = compare_servers(
            one,
            other,
            names,
            tokens=options["tokens"],
            chat=options["chat"],
            questions=questions,
            tell=lambda done: status.update(f"prompt {done} of {len(questions)}"),
        )
    target = options["json_file"]
    text = json.dumps(found.content(), indent=2, ensure_ascii=False) + "\n"
    if target and str(target) == "-":
        click.echo(text, nl=False)
    else:
        for line in lines(found):
            click.echo(printable(line))
    if target and str(target) != "-" and (unwritten := _save(target, text)):
        raise OutputError(f"{unwritten} cannot be written", hint="see what is full")
    return FAILED if found.differs else 0


def _named(name: str, options: dict[str, Any]) -> AbstractContextManager[Subject]:
    """Return one of the servers that ``--between`` names."""
    model, at, url = name.partition("@")
    if not (model and at and url):
        raise UsageError(f"{name} is no NAME@URL", hint="as in gpt2@http://127.0.0.1:8000/v1")
    place = {"openai": url, "url": None} if "://" in url else {"openai": None, "url": url}
    return _endpoint(model, "", {**options, **place})


def _read_questions(path: Path) -> list[Question]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None
    if not (found := [line for line in text.splitlines() if line.strip()]):
        raise UsageError(f"{path} is empty", hint="write a prompt into each line")
    return [_question_in(line) for line in found]


def _question_in(line: str) -> Question:
    """Return a prompt, which as an object of JSON may have several lines, or be a chat.

    >>> _question_in('{"prompt": "one\\ntwo"}').text, _question_in("{ or so").text
    ('one\ntwo', '{ or so')
    >>> _question_in('{"messages": [{"role": "user", "content": "Hi"}]}').text
    'Hi'
    """
    from llmserve_certify.between import Question

    try:
        found = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return Question(line)
    if not isinstance(found, dict):
        return Question(line)
    prompt, messages = found.get("prompt"), found.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        last = messages[-1].get("content")
        return Question(last if isinstance(last, str) else line, tuple(messages))
    return Question(prompt if isinstance(prompt, str) and prompt.strip() else line)


def _chosen(checks: list[Check], only: tuple[str, ...]) -> list[Check]:
    names = {check.name for check in checks}
    for name in only:
        if name not in names:
            raise UsageError(f"there is no check {name!r}", hint=near(name, names))
    return [check for check in checks if not only or check.name in only]


def _print_checks(checks: list[Check]) -> None:
    rows = [(check.name, check.severity, check.promise) for check in checks]
    print_table([("CHECK", "SEVERITY", "PROMISE"), *rows])


@contextmanager
def _examination(model: str, options: dict[str, Any], status: Status) -> Iterator[Examination]:
    adapter, _, files = (options["adapter"] or "").partition("=")
    if bool(files) != bool(adapter and options["against"]):
        hint = "give --adapter NAME=FOLDER with --against, and NAME without"
        raise UsageError("--adapter does not say where the adapter is", hint=hint)
    with ExitStack() as stack:
        endpoint = stack.enter_context(_endpoint(model, adapter, options))
        found: dict[str, Any] = {}
        if (against := options["against"]) and endpoint.task == "generate":
            from llmserve_certify.checkpoint import opened

            reference = found["reference"] = stack.enter_context(opened(against, status.update))
            if files:
                reference.merge_adapter(adapter, locate_adapter(files, status.update))
        elif against:
            from llmserve_certify.encoder import opened_encoder

            found["encoder"] = opened_encoder(against, endpoint.task, status.update)
        precision, budget = options["precision"] or "", options["budget"]
        yield Examination(endpoint, precision=precision, budget=budget, **found)


@contextmanager
def _endpoint(model: str, adapter: str, options: dict[str, Any]) -> Iterator[Subject]:
    always = assigned(options["assignments"])
    if options["openai"]:
        if options["url"] or options["http_url"]:
            raise UsageError("--url and --http-url are Triton's", hint="leave out --openai or them")
        from llmserve_certify.openai import OpenAIEndpoint

        task = "embed" if options["embeddings"] else "generate"
        model = f"{model}:{adapter}" if adapter else model
        yield OpenAIEndpoint(options["openai"], model, options["timeout"], always=always, task=task)
        return
    from llmserve.client import connect, parse_url
    from llmserve.server import url_for
    from llmserve_certify.triton import TritonEndpoint

    always |= {"adapter": adapter} if adapter else {}
    url = url_for(model, options["url"], options["repository"])
    with connect(url, timeout=options["timeout"]) as client:
        http = (options["http_url"] or "").rstrip("/")
        yield TritonEndpoint(client, model, url=str(parse_url(url)), http_url=http, always=always)


def _check_places(options: dict[str, Any]) -> None:
    """See that the report can be written, before it takes minutes to make."""
    json_file, junit = options["json_file"], options["junit"]
    if json_file and json_file == junit:
        raise UsageError("--json and --junit name the same file", hint="give two")
    for path in (json_file, junit):
        if path and str(path) != "-":
            check_file(path)
    if options["report"]:
        check_folder(options["report"], _PAGE, _REPORT)


def _write(report: Report, changed: list[Change] | None, options: dict[str, Any]) -> None:
    target, folder = options["json_file"], options["report"]
    is_printed = str(target) == "-"
    files = [(target, as_json(report))] if target and not is_printed else []
    if options["junit"]:
        files.append((options["junit"], as_junit(report)))
    if folder:
        files += [(folder / _PAGE, page(report, changed)), (folder / _REPORT, as_json(report))]
    unwritten = [words for path, text in files if (words := _save(path, text))]
    # Not before: who reads it may have seen enough, and that would end this.
    if is_printed:
        click.echo(as_json(report))
    else:
        _print(report, changed)
    if unwritten:
        raise OutputError(f"{', '.join(unwritten)} cannot be written", hint="see what is full")
    if folder:
        click.echo(f"{folder / _PAGE}", err=True)


def _save(path: Path, text: str) -> str:
    """Write a file, or return why not: the others must not be lost with it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{path} ({error.strerror})"
    return ""


def _print(report: Report, changed: list[Change] | None) -> None:
    print_table([("RESULT", "CHECK", "SEVERITY", "WHAT"), *map(_row, report.verdicts)])
    for verdict in report.faults:
        click.echo(f"\n{verdict.name}: {printable(verdict.words)}")
        for line in evidence(verdict):
            click.echo(f"  {printable(line)}")
    click.echo(f"\n{result(report)}")
    for name, words in () if changed is None else change_lines(changed):
        click.echo(f"since the baseline: {printable(name)} {words}")


def _row(verdict: Verdict) -> tuple[str, str, str, str]:
    words = printable(verdict.words) or "; ".join(map(printable, verdict.notes[:1]))
    if verdict.cause:
        words = f"follows from {verdict.cause}"
    return verdict.state, verdict.name, verdict.severity, words or verdict.promise
