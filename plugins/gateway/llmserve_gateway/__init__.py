"""The gateway plugin: the OpenAI API in front of Triton, with keys, limits and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmserve.plugin import Frontend, Place, hookimpl, lazy_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click


def _command(place: Place) -> Sequence[str]:
    if not place.keys and not place.open:
        from llmserve_gateway.addresses import refuse_open

        refuse_open(place.host)
    if place.keys:
        # Report invalid keys before models load, and not after.
        from llmserve_gateway.keys import read_keys

        read_keys(place.keys)
    if place.collector:
        from llmserve_gateway.addresses import check_collector

        check_collector(place.collector)
    if place.batches:
        from llmserve_gateway.batches.folder import check_folder

        check_folder(place.batches)
    args = ["-m", __name__]
    for triton in place.tritons:
        args += ["--url", triton.grpc]
        args += ["--triton-metrics", triton.metrics] if triton.metrics else []
    args += ["--host", place.host, "--port", str(place.port), "--grace", str(place.grace)]
    args += ["--supervisor", str(place.status)] if place.status else []
    args += ["--on-demand"] if place.on_demand and place.status else []
    args += [arg for name in place.models for arg in ("--model", name)]
    args += ["--otlp-endpoint", place.collector] if place.collector else []
    args += ["--keys", str(place.keys)] if place.keys else []
    args += ["--batches", str(place.batches)] if place.batches else []
    return [*args, "--no-auth"] if place.open else args


@hookimpl
def llmserve_register_frontends() -> Sequence[Frontend]:
    """Have ``llmserve serve`` start the gateway."""
    summary = "The OpenAI API, with keys, limits, metrics and a page"
    return [
        Frontend(
            name="openai",
            summary=summary,
            command=_command,
            port=8080,
            path="/v1",
            page="/",
            health="/livez",
            default=True,
        )
    ]


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    module, summary = "llmserve_gateway.commands", "Serve the OpenAI API for a running Triton."
    cli.add_command(lazy_command("gateway", f"{module}:gateway", summary, under="Serve"))
    summary = "Create, list, change and revoke API keys for the gateway."
    cli.add_command(lazy_command("key", f"{module}:key", summary, under="Serve"))
