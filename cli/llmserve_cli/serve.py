"""``llmserve serve``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

if TYPE_CHECKING:
    from llmserve.server import Runtime, Server, ServerSettings


@click.command()
@click.argument("repository", type=click.Path(path_type=Path), default=Path("model_repository"))
@click.option(
    "--runtime",
    type=click.Choice(["auto", "embedded", "binary", "docker"]),
    default="auto",
    show_default=True,
    help="Which Triton: the one from PyPI, one on PATH, or NVIDIA's container.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--http-port", type=int, default=8000, show_default=True, help="0 for a free one.")
@click.option("--grpc-port", type=int, default=8001, show_default=True, help="0 for a free one.")
@click.option("--metrics-port", type=int, default=8002, show_default=True, help="0 for a free one.")
@click.option("--model", "models", multiple=True, help="Load only this; repeat for several.")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Where Triton's log goes.")
def serve(
    repository: Path,
    runtime: str,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    models: tuple[str, ...],
    log_file: Path | None,
) -> None:
    """Serve a model repository with a real Triton until Ctrl-C.

    \b
    llmserve serve
    llmserve serve model_repository --model demo --http-port 9000
    """
    from llmserve.errors import ServerError
    from llmserve.manifest import parts_of, references
    from llmserve.server import ServerSettings, start
    from llmserve_cli.ending import end_in_order
    from llmserve_cli.status import Status

    settings = ServerSettings(
        repository=repository,
        runtime=cast("Runtime", runtime),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        models=tuple(m for name in models for m in (*parts_of(repository, name), name)),
        log_file=log_file,
        mounts=tuple(references(repository)) if repository.is_dir() else (),
    )
    settings = _in_its_image(settings)
    _check_environment(settings)
    # A service manager's signal, and Ctrl-C in a background job too, end the server.
    end_in_order(signal.SIGTERM, signal.SIGINT)
    with Status("starting Triton") as status:
        server = start(settings, on_progress=lambda p: status.say(str(p)))
    with server:
        click.echo(_described(server), err=True)
        try:
            code = server.wait()
        except KeyboardInterrupt:
            click.echo("llmserve: stopping, requests in flight are finished first", err=True)
            return
        raise ServerError(
            f"Triton ended by itself (exit code {code})", mend=f"see {server.log_file}"
        )


def _runs_in(settings: ServerSettings, runtime: str) -> bool:
    """Say whether this is how it will be served; without a repository it will not at all."""
    from llmserve.server import first_available

    if not settings.repository.is_dir():
        return False
    return (first_available() if settings.runtime == "auto" else settings.runtime) == runtime


def _in_its_image(settings: ServerSettings) -> ServerSettings:
    """Choose the container's image, and leave out what needs another."""
    if not _runs_in(settings, "docker"):
        return settings
    from dataclasses import replace

    from llmserve.builder.dockerfile import served_by

    image, models = served_by(settings.repository, settings.models)
    if models != settings.models:
        click.echo(f"llmserve: the image {image} serves {', '.join(models)} alone", err=True)
    return replace(settings, image=image, models=models)


def _check_environment(settings: ServerSettings) -> None:
    """Refuse what an embedded server would fail over: it runs in this environment."""
    from llmserve.check import check_environment
    from llmserve.errors import ConfigError

    if not _runs_in(settings, "embedded"):
        return
    problems = check_environment(settings.repository, settings.models)
    missing = [problem for problem in problems if problem.fatal]
    for problem in [*(p for p in problems if not p.fatal), *missing[1:]]:
        click.echo(f"llmserve: {'' if problem.fatal else 'note: '}{problem}", err=True)
    if missing:
        raise ConfigError(str(missing[0]))


def _described(server: Server) -> str:
    from llmserve_cli.standins import stand_ins

    models = sorted(name for name, state in server.models().items() if state == "READY")
    instead = stand_ins(server.metrics_url)
    return "\n".join(
        [
            f"{server.runtime}, log in {server.log_file}",
            f"  http     {server.http_url}",
            f"  grpc     {server.grpc_url}",
            f"  metrics  {server.metrics_url}",
            f"  models   {', '.join(models)}",
            *(f"  {line}" for line in instead),
            "Ctrl-C stops it.",
        ]
    )
