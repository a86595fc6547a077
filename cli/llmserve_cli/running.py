"""``llmserve status`` and ``llmserve reload``: a word with a `serve` that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmserve.errors import ModelNotReadyError, UnreachableError, UsageError
from llmserve_cli.completion import built_models
from llmserve_cli.terminal import print_json, print_table

_URL = click.option("--url", envvar="LLMSERVE_URL", help="Triton's gRPC address, to choose one.")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_URL
def status(as_json: bool, url: str | None) -> None:
    """Tell how the models of a server are.

    It fails where a model is not ready, and where nothing is served.

    \b
    llmserve status
    llmserve status --json
    """
    told = [found for _, found in _served(url)]
    things = [one for found in told for one in _things(found)]
    if as_json:
        print_json({"servers": told})
    else:
        for found in told:
            click.echo(f"{found['url']}  {found['runtime']}, {found['state']}")
            rows = [["", "STATE", "RESTARTS", ""]]
            rows += [
                [one["name"], one["state"], str(one["restarts"]), one["why"] or one.get("url", "")]
                for one in _things(found)
            ]
            print_table(rows)
    if waiting := [one["name"] for one in things if one["state"] != "ready"]:
        raise ModelNotReadyError(f"not ready: {', '.join(waiting)}")


@click.command()
@click.argument("model", shell_complete=built_models)
@_URL
def reload(model: str, url: str | None) -> None:
    """Have a running server take a model in anew.

    The old one answers until the new one is loaded, and finishes what it has begun. A model
    that is new in the repository is loaded as well.

    \b
    llmserve build --plugin hf --model demo --force
    llmserve reload demo
    """
    from llmserve.server.control import ask
    from llmserve_cli.status import Status

    served = _served(url)
    if len(served) > 1:
        urls = ", ".join(found["url"] for _, found in served)
        raise UsageError("more than one `llmserve serve` runs", mend=f"choose with --url: {urls}")
    with Status(f"loading {model}"):
        ask(served[0][0], {"do": "reload", "model": model}, timeout=None)
    click.echo(f"llmserve: {model} is loaded", err=True)


def _things(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a server has, with the number of each replica's where there are several."""
    models = [
        {**one, "name": f"{one['name']} ({number})"}
        for number, replica in enumerate(found.get("replicas", ()), start=1)
        for one in replica["models"]
    ]
    return [*(models or found["models"]), *found["frontends"]]


def _served(url: str | None) -> list[tuple[Path, dict[str, Any]]]:
    from llmserve.client.url import parse_url
    from llmserve.server.control import everybody

    wanted = str(parse_url(url)) if url else None
    found = [
        (path, told)
        for path, told in everybody()
        if wanted in (None, told["url"], *(one["url"] for one in told.get("replicas", ())))
    ]
    if not found:
        raise UnreachableError("no `llmserve serve` runs here", mend="start one, or look at --url")
    return found
