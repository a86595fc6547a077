"""``llmserve status`` and ``llmserve reload``, which talk to a running ``llmserve serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmserve.errors import ModelNotReadyError, UnreachableError, UsageError
from llmserve_cli.completion import built_models
from llmserve_cli.terminal import print_json, print_table

_URL = click.option("--url", envvar="LLMSERVE_URL", help="gRPC address, to select a server.")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@_URL
def status(as_json: bool, url: str | None) -> None:
    """Show the state of served models.

    It fails if a model is not ready or no server is running.

    \b
    llmserve status
    llmserve status --json
    """
    servers = [server for _, server in _find_servers(url)]
    if as_json:
        print_json({"servers": servers})
    else:
        for server in servers:
            click.echo(f"{server['url']}  {server['runtime']}, {server['state']}")
            rows = [["", "STATE", "RESTARTS", ""]]
            for item in _items(server):
                note = item["why"] or item.get("url", "")
                rows.append([item["name"], item["state"], str(item["restarts"]), note])
            print_table(rows)
    items = [item for server in servers for item in _items(server)]
    if not_ready := [item["name"] for item in items if item["state"] != "ready"]:
        raise ModelNotReadyError(f"not ready: {', '.join(not_ready)}")


@click.command()
@click.argument("model", shell_complete=built_models)
@_URL
def reload(model: str, url: str | None) -> None:
    """Reload a model in a running server.

    The old model answers until the new one is loaded, and finishes its requests. A model that was
    added to the repository can be loaded too.

    \b
    llmserve build --plugin hf --model demo --force
    llmserve reload demo
    """
    from llmserve.server.control import ask
    from llmserve_cli.status import Status

    servers = _find_servers(url)
    if len(servers) > 1:
        urls = ", ".join(server["url"] for _, server in servers)
        raise UsageError("several servers are running", mend=f"choose one with --url: {urls}")
    with Status(f"reloading {model}"):
        ask(servers[0][0], {"do": "reload", "model": model}, timeout=None)
    click.echo(f"llmserve: {model} is loaded", err=True)


def _items(server: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the models and frontends of a server; models of replicas have a replica number."""
    models = [
        {**model, "name": f"{model['name']} ({number})"}
        for number, replica in enumerate(server.get("replicas", ()), start=1)
        for model in replica["models"]
    ]
    return [*(models or server["models"]), *server["frontends"]]


def _find_servers(url: str | None) -> list[tuple[Path, dict[str, Any]]]:
    from llmserve.client.url import parse_url
    from llmserve.server.control import running_servers

    address = str(parse_url(url)) if url else None
    servers = [
        (path, server)
        for path, server in running_servers()
        if address in (None, server["url"], *(r["url"] for r in server.get("replicas", ())))
    ]
    if not servers:
        raise UnreachableError("no `llmserve serve` runs here", mend="start one, or check --url")
    return servers
