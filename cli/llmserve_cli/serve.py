"""``llmserve serve``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.errors import ConfigError, LLMServeError
from llmserve_cli.completion import built_models

if TYPE_CHECKING:
    from llmserve.server import Server, ServerSettings
    from llmserve.server.frontend import RunningFrontend
    from llmserve_cli.frontends import Wanted


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
@click.option(
    "--model",
    "models",
    multiple=True,
    shell_complete=built_models,
    help="Load only this; repeat for several.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that requests in flight have when it is stopped.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="So many Tritons that share this machine, and one frontend before all.",
)
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Where Triton's log goes.")
@click.option(
    "--frontend",
    "frontend_names",
    multiple=True,
    help="What listens before Triton, of what is installed; repeat for several, none for none.",
)
@click.option("--frontend-host", help="Its address; by default the one of --host.")
@click.option("--frontend-port", type=int, help="0 for a free one; by default its own.")
@click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File of the API keys that the frontend asks for.",
)
@click.option("--no-auth", is_flag=True, help="Let everybody in at the frontend, on any address.")
@click.option("--otlp-endpoint", metavar="URL", help="Collector to send traces to (OTLP, HTTP).")
def serve(
    repository: Path,
    models: tuple[str, ...],
    frontend_names: tuple[str, ...],
    frontend_host: str | None,
    frontend_port: int | None,
    keys: Path | None,
    no_auth: bool,
    otlp_endpoint: str | None,
    **server_options: Any,
) -> None:
    """Serve a model repository with Triton.

    What is installed to stand before it, such as the OpenAI API, is started as well.

    A model that dies is loaded anew; `llmserve status` tells how all are. It runs until
    Ctrl-C, when requests in flight are finished first. A second Ctrl-C ends it at once.

    \b
    llmserve serve
    llmserve serve model_repository --model demo --http-port 9000
    """
    from llmserve.repository.manifest import parts_of, references
    from llmserve.repository.publish import recover
    from llmserve.roles import Place
    from llmserve.server import ServerSettings, one_log, settings_of_each, start_all
    from llmserve.server.tracing import trace_arguments
    from llmserve_cli.frontends import Wanted
    from llmserve_cli.interrupts import end_in_order
    from llmserve_cli.status import Status

    recover(repository)
    wanted = [part for name in models for part in (*parts_of(repository, name), name)]
    settings = ServerSettings(
        repository=repository,
        models=tuple(dict.fromkeys(wanted)),
        renewable=True,
        mounts=tuple(references(repository)) if repository.is_dir() else (),
        extra_args=trace_arguments(otlp_endpoint) if otlp_endpoint else (),
        **server_options,
    )
    frontends = Wanted(
        frontend_names,
        frontend_port,
        Place(
            url="127.0.0.1:0",
            host=frontend_host or settings.host,
            port=0,
            grace=settings.grace,
            keys=keys and keys.absolute(),
            open=no_auth,
            collector=otlp_endpoint or "",
        ),
    )
    settings = _checked(settings, frontends)
    # Not needed to say what is wrong, which takes less than a second.
    from llmserve.server.supervisor import Supervisor

    # A service manager's signal, and Ctrl-C in a background job too, end the server.
    end_in_order(signal.SIGTERM, signal.SIGINT)
    with ExitStack() as stack:
        each = [stack.enter_context(one_log(one)) for one in settings_of_each(settings)]
        with Status("starting Triton") as status:
            servers = start_all(each, on_progress=lambda p: status.say(str(p)))
        for server in servers:
            stack.enter_context(server)
        keep = settings.log_file is not None
        running = stack.enter_context(frontends.started(servers, models, keep_logs=keep))
        click.echo(_summary(servers, running), err=True)
        for note in servers[0].notes:
            click.echo(f"llmserve: note: {note}", err=True)
        # Until the supervisor listens for it, Ctrl-C is an exception, and there is nothing yet
        # to wait for.
        with suppress(KeyboardInterrupt):
            Supervisor(each, servers, running, _say).run()


def _say(line: str) -> None:
    # Nobody may read any more, and yet it serves on.
    with suppress(OSError):
        click.echo(f"llmserve: {line}", err=True)


def _checked(settings: ServerSettings, frontends: Wanted) -> ServerSettings:
    """Complete the settings, and tell all that would keep the server from starting, at once."""
    from llmserve.server import find_problems, first_available, port_problems
    from llmserve.server.machine import note_of_memory

    problems: list[LLMServeError] = []
    if settings.runtime == "auto":
        try:
            settings = replace(settings, runtime=first_available())
        except LLMServeError as error:
            problems.append(error)
    problems += find_problems(settings)
    if settings.repository.is_dir():
        settings = _in_its_image(settings)
        problems += _problems_of_models(settings)
        if note := note_of_memory(settings):
            click.echo(f"llmserve: note: {note}", err=True)
    problems += port_problems(settings)
    try:
        frontends.choose_places()
    except LLMServeError as error:
        problems.append(error)
    # Three ports at an address that cannot be had are one problem.
    problems = list({str(problem): problem for problem in problems}.values())
    for problem in problems[1:]:
        click.echo(f"llmserve: {problem}", err=True)
    if problems:
        raise problems[0]
    return settings


def _in_its_image(settings: ServerSettings) -> ServerSettings:
    """Choose the container's image, and leave out what needs another."""
    if settings.runtime != "docker":
        return settings
    from llmserve.repository.dockerfile import served_by

    image, models = served_by(settings.repository, settings.models)
    if models != settings.models:
        click.echo(f"llmserve: the image {image} serves {', '.join(models)} alone", err=True)
    return replace(settings, image=image, models=models)


def _problems_of_models(settings: ServerSettings) -> list[LLMServeError]:
    """Return what keeps models from loading; what is only worth knowing is printed."""
    from llmserve.repository.check import check_repository

    problems = check_repository(
        settings.repository,
        models=settings.models,
        quick=True,
        served_here=settings.runtime == "embedded",
    )
    for problem in problems:
        if not problem.fatal:
            click.echo(f"llmserve: note: {problem}", err=True)
    return [ConfigError(str(problem)) for problem in problems if problem.fatal]


def _summary(servers: Sequence[Server], frontends: Sequence[RunningFrontend]) -> str:
    server = servers[0]
    models = sorted(name for name, state in server.models().items() if state == "READY")
    by_original: dict[str, list[str]] = {}
    for model, original in sorted(server.stand_ins().items()):
        by_original.setdefault(original, []).append(model)
    return "\n".join(
        [
            f"{server.runtime}, log in {server.log_file}",
            *(f"  {front.frontend.name:<8} {front.url}" for front in frontends),
            f"  http     {server.http_url}",
            f"  grpc     {server.grpc_url}",
            f"  metrics  {server.metrics_url}",
            *(f"  replica  grpc {one.grpc_url}, log in {one.log_file}" for one in servers[1:]),
            f"  models   {', '.join(models)}",
            *(
                f"  stand-in for {original}, in Python: {', '.join(names)}"
                for original, names in by_original.items()
            ),
            "Ctrl-C stops it.",
        ]
    )
