"""The gateway plugin: the OpenAI API in front of Triton, with keys, limits and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmserve.plugin import Frontend, Place, UsageError, hookimpl, lazy_command

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
    if place.responses:
        from llmserve_gateway.batches.folder import check_folder

        check_folder(place.responses, "--responses")
    from llmserve_gateway.response_stores import named_database

    named_database(place.responses)
    if place.adapter_folder and not place.adapter_folder.is_dir():
        raise UsageError(
            f"there is no folder {place.adapter_folder}", hint="name another with --adapter-folder"
        )
    if place.image_hosts:
        from llmserve_gateway.image_hosts import read_hosts

        read_hosts(place.image_hosts)
    args = ["-m", __name__]
    if place.aliases:
        from llmserve_gateway.model_names import read_aliases

        read_aliases(place.aliases)
    if place.shadows or place.canaries or place.release_tolerances:
        from llmserve_gateway.releases.release import read_plans, read_tolerances

        read_plans(place.shadows, place.canaries)
        read_tolerances(place.release_tolerances)
    if place.release_file:
        from llmserve_gateway.releases.kept import read_releases

        read_releases(place.release_file)
    for triton in place.tritons:
        args += ["--url", triton.grpc]
        args += ["--triton-metrics", triton.metrics] if triton.metrics else []
    args += ["--host", place.host, "--port", str(place.port)]
    args += ["--supervisor", str(place.status)] if place.status else []
    # Without the socket at which models are held, nothing can be loaded when it is needed.
    place = place if place.status else replace(place, on_demand=False)
    return [*args, *place.arguments()]


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
    module = "llmserve_gateway.release_commands"
    summary = "Show, promote and abort releases of new builds."
    cli.add_command(lazy_command("release", f"{module}:release", summary, under="Serve"))
