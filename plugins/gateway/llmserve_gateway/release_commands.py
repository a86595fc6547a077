"""``llmserve release``: what is known of new builds, and what becomes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import click

_URL = click.option(
    "--openai",
    metavar="URL",
    help="The gateway, with an operator's key in OPENAI_API_KEY (default: that of `llmserve "
    "serve`, or http://localhost:8080/v1).",
)
_DEFAULT = "http://localhost:8080/v1"
_PATIENCE = 30.0


@click.group()
def release() -> None:
    """Show, promote and abort releases of new builds.

    A gateway that was started with --shadow or --canary compares a new build of a model with the
    one that users have. If it takes keys, these commands need one of an operator.
    """


@release.command()
@_URL
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def status(openai: str | None, as_json: bool) -> None:
    """Show what is known of each new build.

    \b
    llmserve release status
    llmserve release status --json
    """
    releases = _ask(openai, "/releases")["releases"]
    if as_json:
        click.echo(json.dumps({"releases": releases}))
        return
    if not releases:
        click.echo("llmserve: the gateway has no releases", err=True)
    for each in releases:
        click.echo(_in_words(each))


@release.command()
@click.argument("model")
@click.option("--share", metavar="SHARE", help="A larger share of users, as 25%; all without it.")
@_URL
def promote(model: str, share: str | None, openai: str | None) -> None:
    """Have the new build answer all users, or more.

    \b
    llmserve release promote demo --share 25%
    llmserve release promote demo
    """
    from llmserve_gateway.releases.release import read_share

    fields = {} if share is None else {"share": read_share(share, "--share")}
    told = _ask(openai, "/releases/promote", {"model": model, **fields})
    click.echo(f"llmserve: {_head(told)}", err=True)


@release.command()
@click.argument("model")
@_URL
def abort(model: str, openai: str | None) -> None:
    """Have the old build answer all users again.

    \b
    llmserve release abort demo
    """
    told = _ask(openai, "/releases/abort", {"model": model})
    click.echo(f"llmserve: {_head(told)}", err=True)


@release.command()
@click.argument("model")
@click.argument("page", type=click.Path(path_type=Path, dir_okay=False))
@_URL
def report(model: str, page: Path, openai: str | None) -> None:
    """Write a page about a release, and JSON beside it.

    Only you can read these files. They have ten pairs of answers side by side, with their texts if
    the gateway was started with --keep-texts; those stay in the files until you delete them.

    \b
    llmserve release report demo release.html
    """
    from llmserve.errors import UsageError

    found = {each["model"]: each for each in _ask(openai, "/releases")["releases"]}
    if model not in found:
        raise UsageError(f"there is no release of {model!r}", hint="llmserve release status")
    beside = page.with_suffix(".json")
    if beside == page:
        raise UsageError(f"{page} is to be a page", hint="name it with .html")
    _write(page, _page(found[model]))
    _write(beside, json.dumps(found[model], indent=2) + "\n")
    click.echo(f"llmserve: {page} and {beside} are written", err=True)


def _ask(openai: str | None, path: str, body: Mapping[str, Any] | None = None) -> Any:
    from contextlib import closing

    from llmserve.client import OpenAIApi
    from llmserve.errors import UnreachableError
    from llmserve.server import frontend_for

    url = openai or frontend_for(str((body or {}).get("model", "")), "openai", "--openai")
    api = OpenAIApi(url or _DEFAULT)
    asks = api.get(path, at_root=True) if body is None else api.post(path, body, at_root=True)
    try:
        with closing(api.open(asks, _PATIENCE)) as answer:
            raw = answer.read()
            if answer.status != 200:
                raise api.refusal(answer.status, raw)
        said = json.loads(raw)
    except TimeoutError:
        raise api.late(_PATIENCE) from None
    except OSError as error:
        raise api.unreachable(error) from None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not {"releases", "stage"} & said.keys():
        raise UnreachableError(
            f"the server at {api.url} is no gateway of llmserve",
            hint="give another address with --openai",
        )
    return said


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whatever was there."""
    from llmserve.errors import OutputError

    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


def _head(found: Mapping[str, Any]) -> str:
    whom = "requests" if found["kind"] == "shadow" and found["stage"] == "watched" else "users"
    words = [f"{found['new']} beside {found['model']} ({found['kind']}) is {found['stage']}"]
    words += [f"{found['share']:.1%} of {whom}", found["why"]]
    return ", ".join(filter(None, words))


def _in_words(found: Mapping[str, Any]) -> str:
    lines = [
        _head(found),
        f"  answered: {found['requests']['old']} by {found['model']}, "
        f"{found['requests']['new']} by {found['new']}; compared: {found['compared']}; "
        f"evidence: {found['verdict']}",
    ]
    for each in found["measures"]:
        lines.append(
            f"  {each['name']:<8} {each['new_failures']} of {each['seen']}, before "
            f"{each['old_failures']}: {each['verdict']} ({each['what']})"
        )
    return "\n".join(lines)


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}td,th{border:1px solid #999;padding:.4rem;
text-align:left;vertical-align:top}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.bar{background:#888;height:.7rem}.worse{border-left:.4rem solid #b00}
.side{display:grid;grid-template-columns:1fr 1fr;gap:1rem}"""


def _page(found: Mapping[str, Any]) -> str:
    """Return one page without scripts; whatever models and users have written is text in it."""
    rows = "".join(
        f"<tr><th>{escape(each['name'])}<td>{escape(each['what'])}"
        f"<td>{_bar(each['new_failures'], each['seen'])}<td>"
        f"{_bar(each['old_failures'], each['seen'])}<td>{escape(each['verdict'])}"
        for each in found["measures"]
    )
    pairs = "".join(map(_pair, found["pairs"])) or "<p>Nothing was compared yet.</p>"
    title = escape(f"{found['new']} beside {found['model']}")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{policy}">'
        f"<title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(_head(found))}</p><table><tr><th>Measure<th>What"
        f"<th>{escape(found['new'])}<th>{escape(found['model'])}<th>Verdict{rows}</table>"
        f"<h2>Answers side by side</h2>{pairs}</html>\n"
    )


def _bar(failures: int, seen: int) -> str:
    width = 100 * failures / seen if seen else 0
    return f'{failures} of {seen}<div class="bar" style="width:{width:.1f}%"></div>'


def _pair(pair: Mapping[str, Any]) -> str:
    said = escape("; ".join(pair["said"]) or "no fault is seen")
    mark = " class='worse'" if pair["is_worse"] else ""
    prompt = f"<pre>{escape(pair['prompt'])}</pre>" if pair["prompt"] else ""
    sides = "".join(f"<div><h4>{name}</h4>{_side(pair[name])}</div>" for name in ("old", "new"))
    return f"<section{mark}><h3>{said}</h3>{prompt}<div class='side'>{sides}</div></section>"


def _side(facts: Mapping[str, Any]) -> str:
    if facts["error"]:
        return f"<p>error {escape(facts['error'])}</p>"
    ends = escape(", ".join(each or "-" for each in facts["finish_reasons"]))
    text = f"<pre>{escape(facts['text'])}</pre>" if "text" in facts else ""
    return (
        f"<p>{facts['input_tokens']} tokens of prompt, {facts['output_tokens']} of answer, "
        f"{facts['characters']} characters, {ends}</p>{text}"
    )
