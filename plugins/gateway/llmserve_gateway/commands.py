"""``llmserve gateway`` and ``llmserve key``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

FILE = click.Path(path_type=Path, dir_okay=False)
READABLE = click.Path(path_type=Path, dir_okay=False, exists=True, readable=True)
PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(1)
KEYS = Path("llmserve-keys.json")
# Through the event engine, which newer versions of grpcio have, each message of a stream goes
# through more threads and takes more of the processor. gRPC reads this when it is imported.
GRPC = {"GRPC_EXPERIMENTS": "-event_engine_client"}


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    envvar="LLMSERVE_URL",
    help="Triton's gRPC address; repeat for several that serve the same.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=PORT, default=8080, show_default=True, help="0 for a free one.")
@click.option("--model", "models", multiple=True, help="Offer only this; repeat for several.")
@click.option("--keys", type=FILE, help="File of API keys; without it, only this machine.")
@click.option("--no-auth", is_flag=True, help="Let everybody in, on any address.")
@click.option(
    "--max-requests", type=COUNT, default=256, show_default=True, help="Requests under way."
)
@click.option(
    "--max-queue",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Requests that may wait.",
)
@click.option(
    "--max-queued-tokens",
    type=COUNT,
    default=1_000_000,
    show_default=True,
    help="Tokens of all their prompts.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for a request.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for what is under way at the end.",
)
@click.option(
    "--triton-metrics",
    metavar="URL",
    multiple=True,
    help="Triton's metrics, to give at /metrics/triton; on this machine port 8002 by default. "
    "Repeat for each --url.",
)
@click.option("--open-metrics", is_flag=True, help="Let everybody read metrics, without a key.")
@click.option("--supervisor", type=FILE, hidden=True, help="Where `serve` tells how models are.")
@click.option(
    "--tool-parser",
    "tool_parsers",
    multiple=True,
    envvar="LLMSERVE_TOOL_PARSER",
    metavar="[MODEL=]NAME",
    help="How calls of tools are read, where not by the chat template; repeat for several.",
)
@click.option(
    "--otlp-endpoint",
    "collector",
    metavar="URL",
    default="",
    help="Collector to send traces to (OTLP, HTTP).",
)
@click.option("--cors-origin", "cors_origins", multiple=True, help="Let pages of this origin ask.")
@click.option("--tls-cert", type=READABLE, help="Certificate (PEM), for https.")
@click.option("--tls-key", type=READABLE, help="Its key (PEM).")
def gateway(urls: tuple[str, ...], triton_metrics: tuple[str, ...], **given: Any) -> None:
    """Speak OpenAI before a running Triton.

    \b
    llmserve gateway
    llmserve gateway --url triton.example:8001 --host 0.0.0.0 --keys keys.json
    llmserve gateway --url one.example:8001 --url another.example:8001
    """
    os.environ.update({**GRPC, **os.environ})
    from llmserve.client.url import parse_url
    from llmserve.errors import UsageError
    from llmserve_gateway.admission import Limits
    from llmserve_gateway.gateway import Settings
    from llmserve_gateway.serving import Listening, run

    for each in urls:
        parse_url(each)
    if not triton_metrics and not urls:
        triton_metrics = ("http://127.0.0.1:8002/metrics",)
    url, *others = dict.fromkeys(urls) or ("127.0.0.1:8001",)
    if triton_metrics[len(others) + 1 :]:
        raise UsageError("more of --triton-metrics than of --url", mend="give each --url its own")
    bounds = ("max_requests", "max_queue", "max_queued_tokens")
    limits = Limits(**{name: given.pop(name) for name in bounds})
    where = ("host", "port", "grace", "no_auth", "tls_cert", "tls_key")
    listening = Listening(**{name: given.pop(name) for name in where})
    settings = Settings(
        url,
        limits,
        triton_metrics=triton_metrics[0] if triton_metrics else None,
        replicas=tuple(others),
        replica_metrics=triton_metrics[1:],
        **given,
    )
    run(settings, listening, lambda address: click.echo(f"  openai   {address}", err=True))


@click.group()
def key() -> None:
    """Make API keys for the gateway."""


@key.command()
@click.argument("name")
@click.option("--file", type=FILE, default=KEYS, show_default=True, help="File of keys.")
@click.option("--model", "models", multiple=True, help="May ask only this; repeat for several.")
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="At most so many.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="At most so many.")
def new(name: str, file: Path, models: tuple[str, ...], **limits: int | None) -> None:
    """Make a key and print it; the file gets its hash.

    \b
    llmserve key new alice --file keys.json
    """
    from llmserve_gateway.keys import new_key

    click.echo(new_key(file, name, models=list(models), **limits))
