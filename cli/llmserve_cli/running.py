"""``llmserve status``, ``reload`` and ``unload``, which talk to a running ``llmserve serve``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmserve.commands import built_models, print_json, print_table, selects_a_server
from llmserve.errors import ModelNotReadyError
from llmserve.server import (
    FrontendReport,
    ModelReport,
    PartReport,
    ServerReport,
    find_one,
    find_servers,
    none_runs,
)
from llmserve_cli.terminal import size_in_words

if TYPE_CHECKING:
    from llmserve_cli.model_descriptions import Described


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
    from llmserve_cli.model_descriptions import described

    all_described = [described(server) for server in servers]
    if as_json:
        print_json({"servers": [each.to_json() for each in all_described]})
    else:
        for server, each in zip(servers, all_described, strict=True):
            report = server.report
            words = [report.runtime, server.state, report.repository]
            words += [f"log in {report.log}"] if report.log else []
            click.echo(f"{server.url or server.process()}  {', '.join(filter(None, words))}")
            print_table(table_of(each))
    items = [item for server in servers for item in _items(server.report)]
    not_ready = [item.name for item in items if not item.state.is_well]
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
    from llmserve.server import ask

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
    from llmserve.server import ask

    server = find_one(url, repository, model)
    with Status(f"unloading {model}"):
        ask(server.socket, {"do": "unload", "model": model}, timeout=None)
    click.echo(f"llmserve: {model} is unloaded", err=True)


def table_of(described: Described) -> list[list[str]]:
    """Return the rows that show a server; with memory, if it loads its models on demand."""
    on_demand = described.report.on_demand
    memory = ["MEMORY"] if on_demand else []
    rows = [["", "STATE", "PLUGIN", "SIZE", *memory, "CONTEXT", "RESTARTS", ""]]
    for item in _items(described.report):
        # One of a replica has its number in brackets.
        known = described.of(item.name.partition(" ")[0])
        notes, memory = [item.why], [""] if on_demand else []
        if isinstance(item, ModelReport):
            reads = "reads its warm prompts" if item.reading else ""
            notes = [item.why or item.failing or item.note, reads, *_of_answers(item)]
            if (demand := item.demand) is not None:
                notes = ["pinned" if demand.pinned else "", *notes]
                memory = [size_in_words(demand.size) if demand.loaded else ""]
        elif isinstance(item, FrontendReport):
            known, notes = described.of(""), [item.why or item.url]
        rows.append([
            item.name, item.state.value, known.plugin or "",
            size_in_words(known.disk) if known.disk else "", *memory,
            str(known.context or ""), str(item.restarts), ", ".join(filter(None, notes)),
        ])  # fmt: skip
    return rows


def _of_answers(model: ModelReport) -> list[str]:
    """Return which model it is, and what is known of its answers."""
    certificate = model.certificate
    if certificate is None:
        return [model.fingerprint]
    if fault := certificate.fault:
        return [f"its answers are wrong ({fault.in_words()})", model.fingerprint]
    if certificate.problem:
        return [f"not certified: {certificate.problem}", model.fingerprint]
    judged = f", of users' judged: {certificate.judged}" if certificate.judged else ""
    unjudged = f"users' answers are not judged: {certificate.unjudged}"
    said = [f"answers checked: {certificate.checks}{judged}"]
    return [*said, *([unjudged] if certificate.unjudged else []), model.fingerprint]


def _items(server: ServerReport) -> list[PartReport]:
    """Return the models and frontends of a server; models of replicas have a replica number."""
    known = {model.name: model for model in server.models}
    models = [
        replace(model, name=f"{model.name} ({number})", demand=known[model.name].demand)
        for number, replica in enumerate(server.replicas, start=1)
        for model in replica.models
    ]
    served = {model.name for replica in server.replicas for model in replica.models}
    others = [model for name, model in known.items() if name not in served]
    return [*models, *others, *server.frontends]
