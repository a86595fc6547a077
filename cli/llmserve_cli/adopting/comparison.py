"""The old server's answers beside the new one's, and the speed and memory of both.

The comparison is ``certify --between``, and the measurement ``bench``; both are plugins' commands.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from llmserve.commands import check_folder, printable
from llmserve.errors import LLMServeError, PluginError, UsageError
from llmserve.plugin import ServerFile, install_command
from llmserve_cli.adopting.adopted import Adopted
from llmserve_cli.adopting.logged_prompts import read_logged_prompts
from llmserve_cli.adopting.process_memory import memory_at, memory_of
from llmserve_cli.building import build_file
from llmserve_cli.server_process import serving

_PAGE, _ANSWERS = "report.md", "answers-{}.json"
_DIFFERS = 8
_FIGURES = {
    "output tokens/s": "output_tokens_per_second",
    "first token, median s": "ttft_p50",
    "latency, median s": "latency_p50",
    "latency, p99 s": "latency_p99",
}
_SPEED = ("--requests", "16", "--concurrency", "4", "--output-tokens", "32", "--warmup", "2")


@dataclass(frozen=True)
class Asked:
    """What is to be compared with what."""

    old: str
    """Where the old server is, perhaps with the name of a model and @ before it."""
    prompts: Path | None
    chat: bool
    report: Path


def compare_with_old(ctx: click.Context, out: Path, adopted: Adopted, asked: Asked) -> int:
    """Build and serve what was written, and compare each model; return the exit code."""
    certify, bench = _command(ctx, "certify"), _command(ctx, "bench")
    if certify is None:
        problem = "--compare needs the command certify"
        raise PluginError(problem, hint=install_command("llmserve-certify"))
    named, at, url = asked.old.rpartition("@")
    if not url or (at and not named):
        raise UsageError(f"{asked.old} is no address", hint="as in http://127.0.0.1:8000/v1")
    file = ServerFile.read(out)
    called = {model.name: model.called or model.name for model in adopted.models}
    if named and len(called) > 1:
        raise UsageError("NAME@ is for one model", hint="give --compare URL")
    names = [_ANSWERS.format(name) for name in called]
    check_folder(asked.report, _PAGE, *names)
    asked.report.mkdir(parents=True, exist_ok=True)
    build_file(file, serves=True)
    lines = [f"# {adopted.what}, and llmserve", ""]
    code = 0
    with _prompts_of(asked) as (asked, left_out), _served(file) as (new_url, pid):
        lines += [*(f"Not asked again: {words}." for words in left_out), ""] if left_out else []
        for name, old_name in called.items():
            old = f"{named or old_name}@{url}"
            found, differs = _compare(certify, old, f"{name}@{new_url}", name, asked)
            lines += _answer_lines(name, found)
            code = _DIFFERS if differs else code
            if bench is not None:
                speeds = {
                    "old": _measure(bench, named or old_name, url, asked),
                    "new": _measure(bench, name, new_url, asked),
                }
                lines += _speed_lines(speeds)
        lines += _memory_lines({"old": memory_at(url), "new": memory_of(pid)})
    lines += ["## Not taken over", "", *(f"- {each}" for each in dict.fromkeys(
        map(str, adopted.unmatched))), ""]  # fmt: skip
    page = asked.report / _PAGE
    page.write_text("\n".join(map(printable, lines)), encoding="utf-8")
    click.echo(page)
    return code


def _command(ctx: click.Context, name: str) -> click.Command | None:
    root = ctx.find_root()
    return root.command.get_command(root, name) if isinstance(root.command, click.Group) else None


@contextmanager
def _prompts_of(asked: Asked) -> Iterator[tuple[Asked, tuple[str, ...]]]:
    """Yield what is asked, with a file of prompts in place of a log of requests."""
    logged = read_logged_prompts(asked.prompts) if asked.prompts else None
    if logged is None:
        yield asked, ()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        logged.write(path)
        yield replace(asked, prompts=path, chat=asked.chat or logged.chat), logged.left_out


@contextmanager
def _served(file: ServerFile) -> Iterator[tuple[str, int]]:
    """Serve the models of a file on free ports; yield where they are asked, and the process."""
    models = [word for name in file.models for word in ("--model", name)]
    with serving(file.repository, [*models, "--port", "0"]) as (server, _):
        fronts = [each.url for each in server.report.frontends]
        yield next(iter(fronts), server.url), server.report.pid


def _compare(
    certify: click.Command, old: str, new: str, name: str, asked: Asked
) -> tuple[Mapping[str, Any], bool]:
    path = asked.report / _ANSWERS.format(name)
    words = ["--between", old, new, "--json", str(path)]
    words += ["--prompts", str(asked.prompts)] if asked.prompts else []
    words += ["--chat"] if asked.chat else []
    code = _run(certify, words)
    return json.loads(path.read_text(encoding="utf-8")), bool(code)


def _run(command: click.Command, words: Sequence[str]) -> Any:
    return command.main(list(words), prog_name=str(command.name), standalone_mode=False)


def _measure(
    bench: click.Command, name: str, url: str, asked: Asked
) -> Mapping[str, Any] | LLMServeError:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speed.json"
        place = ["--openai", url] if "://" in url else ["--url", url]
        words = [name, *place, *_SPEED, "--json", str(path)]
        words += ["--chat"] if asked.chat and "://" in url else []
        words += ["--dataset", str(asked.prompts)] if asked.prompts else []
        try:
            _run(bench, words)
            found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except LLMServeError as error:
            # The answers are compared all the same.
            return error
        return found


def _answer_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    pairs = found["pairs"]
    counts = {each["verdict"] for each in pairs}
    lines = [f"## {name}: {len(pairs)} prompts", ""]
    for verdict in sorted(counts):
        number = sum(each["verdict"] == verdict for each in pairs)
        lines.append(f"- {number} {verdict}")
    lines += ["", "| prompt | verdict | both | old | new |", "|---|---|---|---|---|"]
    for each in pairs:
        texts = (each["one"]["error"] or each["one"]["text"],
                 each["other"]["error"] or each["other"]["text"])  # fmt: skip
        row = (each["prompt"], each["verdict"], each["common"], *texts)
        lines.append(f"| {' | '.join(map(_cell, row))} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _speed_lines(speeds: Mapping[str, Mapping[str, Any] | LLMServeError]) -> list[str]:
    load = " ".join(_SPEED)
    lines = [f"Speed, by `llmserve bench` with `{load}`:", "", f"| | {' | '.join(_FIGURES)} |"]
    lines.append("|---" * (len(_FIGURES) + 1) + "|")
    for who, found in speeds.items():
        if isinstance(found, LLMServeError):
            lines.append(f"| {who} | {_cell(str(found))} |{' |' * (len(_FIGURES) - 1)}")
            continue
        values = [figure_in(found, key) for key in _FIGURES.values()]
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return [*lines, ""]


def _memory_lines(sizes: Mapping[str, int | None]) -> list[str]:
    lines = ["## Memory", "", "Of a server with all its models, after the requests:", ""]
    for who, size in sizes.items():
        lines.append(f"- {who}: {'not known' if size is None else f'{size / 1e6:.0f} MB'}")
    return [*lines, ""]


def figure_in(found: object, key: str) -> float | None:
    """Return the first number of a name in a result, wherever it stands.

    >>> figure_in({"runs": [{"figures": {"latency_p50": 0.5}}]}, "latency_p50")
    0.5
    """
    pending = [found]
    while pending:
        each = pending.pop(0)
        if isinstance(each, Mapping):
            value = each.get(key)
            if isinstance(value, (int, float)):
                return float(value)
            pending += each.values()
        elif isinstance(each, list):
            pending += each[:4]
    return None
