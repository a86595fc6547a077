"""``llmserve gateway`` and ``llmserve key``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

FILE = click.Path(path_type=Path, dir_okay=False)
READABLE = click.Path(path_type=Path, dir_okay=False, exists=True, readable=True)
PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(1)
KEYS = Path("llmserve-keys.json")
# With the event engine of newer grpcio versions, each message of a stream passes through more
# threads and takes more processor time. gRPC reads this when it is imported.
GRPC = {"GRPC_EXPERIMENTS": "-event_engine_client"}


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    envvar="LLMSERVE_URL",
    help="Triton's gRPC address; repeat for several that serve the same models.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=PORT, default=8080, show_default=True, help="0 for a free port.")
@click.option("--model", "models", multiple=True, help="Offer only this model; repeatable.")
@click.option("--keys", type=FILE, help="File of API keys; without it, only local clients.")
@click.option("--no-auth", is_flag=True, help="Serve without keys, on any address.")
@click.option(
    "--max-requests", type=COUNT, default=256, show_default=True, help="Concurrent requests."
)
@click.option(
    "--max-queue",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Requests that may wait for a slot.",
)
@click.option(
    "--max-queued-tokens",
    type=COUNT,
    default=1_000_000,
    show_default=True,
    help="Tokens in the prompts of all requests to one model.",
)
@click.option(
    "--batches",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="LLMSERVE_BATCHES",
    metavar="FOLDER",
    help="Accept files and batches of requests, and keep them in this folder.",
)
@click.option(
    "--batch-requests",
    type=COUNT,
    default=32,
    show_default=True,
    envvar="LLMSERVE_BATCH_REQUESTS",
    help="Concurrent requests of batches while there are no others.",
)
@click.option(
    "--batch-beside",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    envvar="LLMSERVE_BATCH_BESIDE",
    help="Concurrent requests of batches beside others.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a request may take.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for running requests to end on shutdown.",
)
@click.option(
    "--triton-metrics",
    metavar="URL",
    multiple=True,
    help="Triton's metrics, to serve at /metrics/triton; without --url port 8002 of this machine. "
    "Repeat for each --url.",
)
@click.option("--open-metrics", is_flag=True, help="Serve metrics without a key.")
@click.option("--supervisor", type=FILE, hidden=True, help="Control socket of `serve`.")
@click.option("--on-demand", is_flag=True, hidden=True, help="Whether it loads on demand.")
@click.option(
    "--tool-parser",
    "tool_parsers",
    multiple=True,
    envvar="LLMSERVE_TOOL_PARSER",
    metavar="[MODEL=]NAME",
    help="Tool call parser, instead of the one for the chat template; repeatable.",
)
@click.option(
    "--tool-prompt",
    "tool_prompt",
    type=READABLE,
    envvar="LLMSERVE_TOOL_PROMPT",
    help="File with the text that explains tools to models whose chat template does not; "
    "{tools} stands for their list.",
)
@click.option(
    "--otlp-endpoint",
    "collector",
    metavar="URL",
    default="",
    help="Collector to send traces to (OTLP over HTTP).",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    envvar="LLMSERVE_ALLOWED_HOST",
    metavar="NAME",
    help="Answer for this host as well, besides localhost; repeatable, * for any.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    envvar="LLMSERVE_CORS_ORIGIN",
    help="Allow pages of this origin; repeatable.",
)
@click.option("--tls-cert", type=READABLE, help="Certificate (PEM), for https.")
@click.option("--tls-key", type=READABLE, help="Private key of the certificate (PEM).")
def gateway(
    urls: tuple[str, ...],
    triton_metrics: tuple[str, ...],
    tool_prompt: Path | None,
    **options: Any,
) -> None:
    """Serve the OpenAI API in front of a running Triton.

    \b
    llmserve gateway
    llmserve gateway --url triton.example:8001 --host 0.0.0.0 --keys keys.json
    llmserve gateway --url one.example:8001 --url another.example:8001
    """
    os.environ.update({**GRPC, **os.environ})
    from dataclasses import fields

    from llmserve.client import parse_url
    from llmserve.plugin import Address, UsageError
    from llmserve_gateway.admission import Limits
    from llmserve_gateway.gateway import Settings
    from llmserve_gateway.serving import Listening, run

    for address in urls:
        parse_url(address)
    if not triton_metrics and not urls:
        triton_metrics = ("http://127.0.0.1:8002/metrics",)
    addresses = [*dict.fromkeys(urls)] or ["127.0.0.1:8001"]
    if triton_metrics[len(addresses) :]:
        raise UsageError("more --triton-metrics than --url", hint="give one for each --url")
    pairs = zip_longest(addresses, triton_metrics, fillvalue="")
    limit_names = [field.name for field in fields(Limits)]
    limits = Limits(**{name: options.pop(name) for name in limit_names})
    listening_names = ("host", "port", "grace", "no_auth", "tls_cert", "tls_key")
    listening = Listening(**{name: options.pop(name) for name in listening_names})
    settings = Settings(
        tuple(Address(url, metrics=metrics) for url, metrics in pairs),
        limits,
        tool_prompt=read_prompt(tool_prompt) if tool_prompt else "",
        **options,
    )

    def say_where(url: str) -> None:
        click.echo(f"  openai   {url}", err=True)
        for address in silent(addresses) if settings.supervisor is None else ():
            click.echo(f"llmserve: note: no Triton answers at {address} yet", err=True)

    run(settings, listening, say_where)


def silent(addresses: Iterable[str]) -> list[str]:
    """Return the addresses at which nothing listens now."""
    from llmserve.client import parse_url

    found = []
    for address in addresses:
        place = parse_url(address)
        try:
            socket.create_connection((place.host.strip("[]"), place.port), timeout=1).close()
        except OSError:
            found.append(address)
    return found


def read_prompt(path: Path) -> str:
    """Read the text that explains tools to a model."""
    from llmserve.client import TOOLS_PLACE
    from llmserve.errors import UsageError

    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tool-prompt {path} cannot be read: {error}") from None
    if TOOLS_PLACE not in text:
        hint = f"write {TOOLS_PLACE} where the functions are to be listed"
        raise UsageError(f"--tool-prompt {path} does not show the tools", hint=hint)
    return text


@click.group()
def key() -> None:
    """Create API keys for the gateway."""


@key.command()
@click.argument("name")
@click.option("--file", type=FILE, default=KEYS, show_default=True, help="Key file.")
@click.option("--model", "models", multiple=True, help="Allow only this model; repeatable.")
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Rate limit.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Rate limit.")
@click.option("--all-metrics", is_flag=True, help="Show it the metrics of all models.")
@click.option("--operator", is_flag=True, help="Let it load and unload models.")
def new(name: str, file: Path, models: tuple[str, ...], **limits: Any) -> None:
    """Create a key and print it; its hash is added to the file.

    The key is shown this once. To withdraw it, delete its entry from the file, also while a gateway
    runs.

    \b
    llmserve key new alice --file keys.json
    llmserve serve --keys keys.json
    """
    from llmserve_gateway.keys import new_key

    click.echo(new_key(file, name, models=list(models), **limits))
    click.echo(f"its hash is in {file}, which --keys reads", err=True)
