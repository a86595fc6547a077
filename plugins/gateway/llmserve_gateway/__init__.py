"""The front door: the OpenAI API before Triton, with keys, limits and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import Frontend, Place, ToolParser, hookimpl, lazy_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click


def _command(place: Place) -> Sequence[str]:
    if not place.keys and not place.open:
        from llmserve_gateway.addresses import refuse_open

        refuse_open(place.host)
    if place.keys:
        # What is wrong with them is told before models load, and not after.
        from llmserve_gateway.keys import read_keys

        read_keys(place.keys)
    if place.collector:
        from llmserve_gateway.addresses import check_collector

        check_collector(place.collector)
    words = ["-m", __name__, "--url", place.url, "--host", place.host, "--port", str(place.port)]
    words += ["--grace", str(place.grace)]
    words += [word for url in place.replicas for word in ("--url", url)]
    metrics = (place.metrics, *place.replica_metrics)
    words += [word for url in metrics if url for word in ("--triton-metrics", url)]
    words += ["--supervisor", str(place.status)] if place.status else []
    words += [word for name in place.models for word in ("--model", name)]
    words += ["--otlp-endpoint", place.collector] if place.collector else []
    words += ["--keys", str(place.keys)] if place.keys else []
    return [*words, "--no-auth"] if place.open else words


@hookimpl
def llmserve_register_frontends() -> Sequence[Frontend]:
    """Have ``llmserve serve`` start the gateway."""
    summary = "The OpenAI API, with keys, limits, metrics and a page"
    return [Frontend(name="openai", summary=summary, command=_command, port=8080, path="/v1")]


@hookimpl
def llmserve_register_tool_parsers() -> Sequence[ToolParser]:
    """Say how the families of models write that they call tools."""
    from llmserve_gateway.tool_parsers import PARSERS

    return PARSERS


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    home, summary = "llmserve_gateway.commands", "Speak OpenAI before a running Triton."
    cli.add_command(lazy_command("gateway", f"{home}:gateway", summary, under="Serve"))
    summary = "Make API keys for the gateway."
    cli.add_command(lazy_command("key", f"{home}:key", summary, under="Serve"))
