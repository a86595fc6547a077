"""``llmserve serve``."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.commands import printable
from llmserve.errors import LLMServeError, ServerError, UsageError
from llmserve.plugin import FileCommand, Problem
from llmserve.server import REPOSITORY_FOLDER, find_servers
from llmserve_cli.building import CONFIG, FIT, NAME, PLUGIN, SET
from llmserve_cli.completion import what_to_serve
from llmserve_cli.on_demand import (
    at_start,
    check_runtime,
    limited,
    offered_models,
    take_on_demand,
)
from llmserve_cli.openness import host_of_triton, reach, refuse_unused
from llmserve_cli.options import serve_options
from llmserve_cli.served import Asked, options_of, served_repository
from llmserve_cli.triton_flags import triton_arguments

if TYPE_CHECKING:
    from llmserve.plugin import Repository
    from llmserve.server import LoadProgress, OnDemand, Server, ServerSettings
    from llmserve.server.keep.start_report import StartReport
    from llmserve.server.run.frontend import RunningFrontend
    from llmserve_cli.frontends import RequestedFrontends


@click.command(cls=FileCommand, subject="served", verb="serve", options=options_of)
@click.argument(
    "served",
    metavar="[REPOSITORY | MODEL]",
    default=str(REPOSITORY_FOLDER),
    shell_complete=what_to_serve,
)
@CONFIG
@PLUGIN
@NAME
@SET
@FIT
@serve_options
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    served: str,
    config: Path | None,
    plugin: str | None,
    name: str | None,
    assignments: tuple[str, ...],
    fit: bool | None,
    **values: Any,
) -> None:
    """Serve a model repository with Triton.

    A model that is given instead is built first, unless it was before: a folder, a GGUF file, an
    id on the Hugging Face hub, or a name that `llmserve list` shows. --plugin, --name, --set and
    --fit are for that.

    llmserve.toml in the current folder, or --config, may say all of it: models, which are built if
    needed, and options.

    It also starts the OpenAI API, if that is installed, and the frontends that --frontend names.

    Models that die are reloaded; `llmserve status` shows the state of all. Ctrl-C stops the server
    after finishing requests in flight. A second Ctrl-C stops it at once.

    With --on-demand, all models are offered, and the OpenAI API loads the one that a request names;
    the one that was not used for longest makes place for it.

    \b
    llmserve serve
    llmserve serve model_repository --model demo --port 9000
    llmserve serve gpt2 --plugin hf
    llmserve serve --config llmserve.toml --replicas 2
    llmserve serve --on-demand --max-loaded 2 --pin demo
    """
    from llmserve.commands import Status
    from llmserve.plugin import Address, Place, Repository
    from llmserve.repository.publish import recover
    from llmserve.server import ServeOptions, ServerSettings, one_log, settings_of_each, start_all
    from llmserve.server.run.tracing import trace_arguments
    from llmserve_cli.frontends import RequestedFrontends
    from llmserve_cli.interrupts import raise_on_interrupt

    del config
    options = ServeOptions(**values)
    _refuse_missing_keys(options.keys)
    repository, models = served_repository(
        ctx, served, options.models, Asked(plugin, name, assignments, fit)
    )
    recover(repository)
    found = Repository.open(repository)
    on_demand = take_on_demand(ctx, options)
    offered = offered_models(found, models, on_demand) if on_demand else []
    host, collector = options.host, options.otlp_endpoint
    settings = ServerSettings(
        repository=repository,
        host=host_of_triton(host, open_triton=options.open_triton),
        models=found.with_parts(models),
        renewable=True,
        partial=True,
        mounts=tuple(map(Path, found.references())),
        extra_args=(
            *(trace_arguments(collector) if collector else ()),
            *triton_arguments(options.triton_flags),
        ),
        **options.settings(),
    )
    frontends = RequestedFrontends(
        options.frontend_names,
        options.frontend_port,
        Place(
            tritons=(Address("127.0.0.1:0"),),
            host=options.frontend_host or host,
            port=0,
            **options.place(),
        ),
    )
    settings, left_out = _checked(settings, found, frontends, on_demand, host)
    for other in find_servers(repository=repository):
        _notify(
            f"note: {other.process()} serves {repository} too, at {other.url}: what is built anew "
            "is reloaded in each by itself"
        )
    # Before the pinned models are loaded, which are part of it.
    on_demand = on_demand and limited(on_demand)
    # Imported only now, so that problems are reported in less than a second.
    from llmserve.server.keep.start_report import StartReport
    from llmserve.server.keep.supervisor import Supervisor

    # SIGTERM comes from service managers. SIGINT must work in a background job too.
    raise_on_interrupt(signal.SIGTERM, signal.SIGINT)
    problems = [f"{name} was left out: {why}" for name, why in left_out.items()]
    supervisor = None

    def went_wrong() -> list[str]:
        later: list[str] = supervisor.went_wrong if supervisor is not None else []
        return list(dict.fromkeys([*problems, *later]))

    def notify_of_start(line: str) -> None:
        problems.append(line)
        status.note(f"llmserve: {line}")

    with ExitStack() as stack:
        replicas = [
            stack.enter_context(one_log(replica, keep=lambda: bool(went_wrong())))
            for replica in settings_of_each(settings)
        ]
        loading = StartReport(replicas[0])
        control = stack.enter_context(_announced(loading))
        with Status("starting Triton") as status:

            def follow(progress: LoadProgress) -> None:
                loading.follow(progress)
                status.update(str(progress))

            servers = start_all(replicas, on_progress=follow, notify=notify_of_start)
        loading.done(servers[0].failures)
        for server in servers:
            server.failures = {**left_out, **server.failures}
            stack.enter_context(server)
        chosen = settings.log_file is not None
        running = stack.enter_context(
            frontends.started(
                servers,
                models,
                control,
                chosen_log=chosen,
                keep_logs=lambda: chosen or bool(went_wrong()),
            )
        )
        click.echo(_summary(servers, running, offered), err=True)
        for note in servers[0].notes:
            click.echo(f"llmserve: note: {note}", err=True)
        supervisor = Supervisor(
            replicas, servers, running, _notify, control, on_demand=on_demand, offered=offered
        )
        # Until the supervisor handles signals, Ctrl-C raises an exception, and there is nothing to
        # wait for yet.
        with suppress(KeyboardInterrupt):
            supervisor.run()
        if wrong := went_wrong():
            logs = ", ".join(str(replica.log_file) for replica in replicas)
            _notify(f"not everything went well ({'; '.join(wrong)}): the log is in {logs}")


def _refuse_missing_keys(keys: Path | None) -> None:
    """Refuse a file of keys that is not there, before anything is built."""
    if keys is not None and not keys.exists():
        raise UsageError(
            f"there is no file of keys {keys}", hint=f"llmserve key new NAME --file {keys}"
        )


@contextmanager
def _announced(loading: StartReport) -> Iterator[Path | None]:
    """List the server for the commands that look for one, from now on."""
    from llmserve.server.keep.control import announced

    with ExitStack() as stack:
        path = None
        try:
            path = stack.enter_context(announced(loading.answer))
        except (OSError, ServerError) as error:
            _notify(f"note: `llmserve status` and others will not see this server: {error}")
        yield path


def _notify(line: str) -> None:
    # If stderr is closed, the server must continue.
    with suppress(OSError):
        # The line may quote a log, into which anybody may have written.
        click.echo(f"llmserve: {printable(line)}", err=True)


def _checked(
    settings: ServerSettings,
    repository: Repository,
    frontends: RequestedFrontends,
    on_demand: OnDemand | None,
    host: str,
) -> tuple[ServerSettings, dict[str, str]]:
    """Complete the settings, and report all problems that would prevent a start, at once.

    Return also the models that cannot be served, and why; the settings are without them.
    """
    from llmserve.server import find_problems, first_available, port_problems
    from llmserve.server.run.machine import note_of_memory

    problems: list[Problem] = []
    if settings.runtime == "auto":
        try:
            settings = replace(settings, runtime=first_available())
        except LLMServeError as error:
            problems.append(Problem.of(error))
    left_out: dict[str, str] = {}
    if settings.repository.is_dir():
        settings = _with_image(settings, repository)
        settings, left_out, model_problems = _without_broken(settings, repository)
        problems += model_problems
        for name, why in left_out.items():
            _notify(f"{name} is left out: {why}")
        if on_demand:
            # Before its models are those that are loaded at the start.
            if refused := check_runtime(settings, repository):
                problems.append(Problem.of(refused))
            settings = at_start(settings, repository, on_demand)
    problems += find_problems(settings)
    if settings.repository.is_dir() and (note := note_of_memory(settings)):
        click.echo(f"llmserve: note: {note}", err=True)
    problems += port_problems(settings)
    try:
        frontends.choose_places(settings.ports())
        refuse_unused(host, [settings.host, *frontends.hosts()])
    except LLMServeError as error:
        problems.append(Problem.of(error))
    # For three ports of an unavailable address, one problem is enough.
    problems = list({str(problem): problem for problem in problems}.values())
    for problem in problems[1:]:
        click.echo(f"llmserve: {printable(str(problem))}", err=True)
    if any(problem.code == "port_in_use" for problem in problems):
        for server in find_servers():
            if server.has_port({*settings.ports().values(), *frontends.ports()}):
                click.echo(f"llmserve: note: another serve runs here, {server}", err=True)
    if problems:
        raise problems[0].error()
    return settings, left_out


def _with_image(settings: ServerSettings, repository: Repository) -> ServerSettings:
    """Choose the container's image, and drop the models that need another image."""
    if settings.runtime != "docker":
        return settings
    from llmserve.plugin import image_for

    image = image_for(repository, settings.models)
    if image.models != settings.models:
        names = ", ".join(image.models)
        click.echo(f"llmserve: the image {image.name} serves only {names}", err=True)
    return replace(settings, image=image.name, models=image.models)


def _without_broken(
    settings: ServerSettings, repository: Repository
) -> tuple[ServerSettings, dict[str, str], list[Problem]]:
    """Leave out the models that cannot be loaded, if any is left; else return the problems.

    Problems that do not prevent a model from loading are printed.
    """
    from llmserve.plugin import check_repository
    from llmserve.server import with_dependents
    from llmserve.server.find.embedded import missing_backends

    here = settings.runtime == "embedded"
    problems = check_repository(repository, models=settings.models, quick=True, served_here=here)
    for problem in problems:
        if not problem.fatal:
            click.echo(f"llmserve: note: {printable(str(problem))}", err=True)
    fatal = [problem for problem in problems if problem.fatal]
    existing = repository.models
    names = [name for name in settings.models or existing if name in existing]
    # The first of a model says why; one without a backend here is found by the server as well.
    here_too = missing_backends(settings) if here else []
    broken = {p.where: str(replace(p, where="")) for p in reversed([*fatal, *here_too])}
    left_out = with_dependents(repository, broken)
    rest = tuple(name for name in names if name not in left_out)
    if not left_out or not rest or not left_out.keys() <= existing.keys():
        return settings, {}, fatal
    left_out = {name: left_out[name] for name in names if name in left_out}
    return replace(settings, models=rest), left_out, []


def _lines_of(front: RunningFrontend) -> Iterator[str]:
    open_to = reach(front.place.host, keys=front.place.keys is not None)
    yield f"  {front.frontend.name:<8} {front.url}{open_to}"
    if front.page_url:
        yield f"  page     {front.page_url}{open_to}"


def _summary(
    servers: Sequence[Server], frontends: Sequence[RunningFrontend], offered: Sequence[str]
) -> str:
    server = servers[0]
    models = sorted(name for name, state in server.models().items() if state == "READY")
    by_backend: dict[str, list[str]] = {}
    for model, backend in sorted(server.stand_ins().items()):
        by_backend.setdefault(backend, []).append(model)
    open_to = reach(server.ports.host, keys=False)
    return "\n".join(
        [
            f"{server.runtime}, log in {server.log_file}",
            *(line for front in frontends for line in _lines_of(front)),
            f"  http     {server.http_url}{open_to}",
            f"  grpc     {server.grpc_url}{open_to}",
            f"  metrics  {server.metrics_url}{open_to}",
            *(f"  replica  grpc {s.grpc_url}, log in {s.log_file}" for s in servers[1:]),
            *([f"  models   {', '.join(models)}"] if models else ()),
            *([f"  on demand: {', '.join(offered)}"] if offered else ()),
            *([f"  left out {', '.join(server.failures)}"] if server.failures else ()),
            *(
                f"  stand-in for {backend}, in Python: {', '.join(names)}"
                for backend, names in by_backend.items()
            ),
            "Ctrl-C stops it.",
        ]
    )
