"""``llmserve status``, ``reload`` and ``unload``, which talk to a running ``llmserve serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmserve.commands import built_models, print_json, print_table, selects_a_server
from llmserve.errors import ModelNotReadyError
from llmserve.server import find_one, find_servers, none_runs
from llmserve_cli.terminal import size_in_words

_WELL = ("ready", "unloaded")
"""The states of models that answer, if need be after they are loaded."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@selects_a_server
def status(as_json: bool, url: str | None, repository: Path | None) -> None:
    """Show the state of served models.

    It says what each model is, how much of the disk it takes, and how many tokens of prompt and
    answer it takes. Models of the repository that are not loaded are listed as well. It fails if
    a model is not ready or no server is running.

    \b
    llmserve status
    llmserve status --json
    """
    servers = find_servers(url, repository)
    if not servers:
        raise none_runs(url, repository)
    from llmserve_cli.described import described

    reports = [described(server) for server in servers]
    if as_json:
        print_json({"servers": reports})
    else:
        for server, report in zip(servers, reports, strict=True):
            log = server.status.get("log")
            words = [server.status.get("runtime"), server.state, server.status.get("repository")]
            words += [f"log in {log}"] if log else []
            click.echo(f"{server.url or server.process()}  {', '.join(filter(None, words))}")
            print_table(_table(report))
    items = [item for server in servers for item in _items(server.status)]
    not_ready = [item["name"] for item in items if item["state"] not in _WELL]
    not_ready += [server.process() for server in servers if server.is_silent]
    if not_ready:
        raise ModelNotReadyError(f"not ready: {', '.join(not_ready)}")


@click.command()
@click.argument("model", shell_complete=built_models)
@selects_a_server
def reload(model: str, url: str | None, repository: Path | None) -> None:
    """Load or reload a model in a running server.

    The old model answers until the new one is loaded, and finishes its requests. A model that was
    added to the repository can be loaded too.

    \b
    llmserve build --plugin hf --model demo --force
    llmserve reload demo
    """
    from llmserve.commands import Status
    from llmserve.server.keep.control import ask

    server = find_one(url, repository, model)
    doing, done = ("reloading", "reloaded") if model in server.models else ("loading", "loaded")
    with Status(f"{doing} {model}"):
        ask(server.socket, {"do": "reload", "model": model}, timeout=None)
    click.echo(f"llmserve: {model} is {done}", err=True)


@click.command()
@click.argument("model", shell_complete=built_models)
@selects_a_server
def unload(model: str, url: str | None, repository: Path | None) -> None:
    """Unload a model from a running server.

    It finishes its requests. Its files stay, and `llmserve reload` loads it again.

    \b
    llmserve unload demo
    """
    from llmserve.commands import Status
    from llmserve.server.keep.control import ask

    server = find_one(url, repository, model)
    with Status(f"unloading {model}"):
        ask(server.socket, {"do": "unload", "model": model}, timeout=None)
    click.echo(f"llmserve: {model} is unloaded", err=True)


def _table(server: dict[str, Any]) -> list[list[str]]:
    """Return the rows that show a server; with memory, if it loads its models on demand."""
    on_demand = bool(server.get("on_demand"))
    memory = ["MEMORY"] if on_demand else []
    rows = [["", "STATE", "PLUGIN", "SIZE", *memory, "CONTEXT", "RESTARTS", ""]]
    for item in _items(server):
        note = item["why"] or item.get("failing") or item.get("note") or item.get("url", "")
        notes = [*(["pinned"] if item.get("pinned") else []), *([note] if note else [])]
        disk = size_in_words(item["disk"]) if item.get("disk") else ""
        memory = [size_in_words(item["size"]) if item.get("loaded") else ""] if on_demand else []
        rows.append([
            item["name"], item["state"], item.get("plugin") or "", disk, *memory,
            str(item.get("context") or ""), str(item["restarts"]), ", ".join(notes),
        ])  # fmt: skip
    return rows


def _items(server: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the models and frontends of a server; models of replicas have a replica number."""
    replicas = server.get("replicas", ())
    known = {model["name"]: model for model in server["models"]}
    models = [
        {**known[model["name"]], **model, "name": f"{model['name']} ({number})"}
        for number, replica in enumerate(replicas, start=1)
        for model in replica["models"]
    ]
    served = {model["name"] for replica in replicas for model in replica["models"]}
    others = [model for name, model in known.items() if name not in served]
    return [*models, *others, *server["frontends"]]
