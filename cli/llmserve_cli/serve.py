"""``llmserve serve``."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.commands import printable
from llmserve.errors import LLMServeError, UsageError
from llmserve.plugin import FileCommand, Problem, server_file_of
from llmserve.runtime.contract import WARM, WARM_BYTES
from llmserve.server import REPOSITORY_FOLDER, find_servers
from llmserve_cli.building import CONFIG, FIT, NAME, PLUGIN, SET
from llmserve_cli.completion import what_to_serve
from llmserve_cli.on_demand import (
    limited,
    offered_models,
    take_on_demand,
)
from llmserve_cli.options import serve_options
from llmserve_cli.reachability import host_of_triton, reach, refuse_unused
from llmserve_cli.served_repository import Asked, options_of, served_repository
from llmserve_cli.triton_flags import triton_arguments

if TYPE_CHECKING:
    from llmserve.server import OnDemand, ServeOptions, ServerSettings, Serving
    from llmserve_cli.frontends import RequestedFrontends

_GB = 1_000_000_000


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

    With --certify, models are asked again and again, while they are idle, what they answered when
    they were first well; --on-fault is told if that changes by more than rounding explains. With
    --certify-share 0.01, they judge a hundredth of their answers to users as well.

    With --warm, a prompt that begins as an earlier one is not read anew, also after a restart. What
    is kept on disk tells what prompts said; `llmserve warm clear` deletes it.

    With --on-demand, all models are offered, and the OpenAI API loads the one that a request names;
    the one that was not used for longest makes place for it.

    \b
    llmserve serve
    llmserve serve model_repository --model demo --port 9000
    llmserve serve gpt2 --plugin hf
    llmserve serve --config llmserve.toml --replicas 2
    llmserve serve --on-demand --max-loaded 2 --pin demo
    llmserve serve --warm 4
    llmserve serve --certify --on-fault 'logger -t llmserve'
    """
    from llmserve.commands import Status
    from llmserve.plugin import Address, Place, Repository, Store
    from llmserve.server import ServeOptions, ServerSettings
    from llmserve_cli.frontends import RequestedFrontends
    from llmserve_cli.interrupts import raise_on_interrupt

    del config
    options = ServeOptions(**values)
    _refuse_missing_keys(options.keys)
    if options.on_fault and not options.certify:
        raise UsageError("--on-fault is told of what --certify finds", hint="add --certify")
    if options.certify_share and not options.certify:
        raise UsageError("--certify-share is a part of --certify", hint="add --certify")
    if (options.certify_share or 0) > 1:
        raise UsageError("--certify-share is a share of answers", hint="give one such as 0.01")
    file = server_file_of(ctx)
    warm_prompts = file.warm_prompts() if file is not None else {}
    if warm_prompts and options.keys and options.warm and options.warm_scope == "key":
        raise UsageError(
            "with --keys and --warm, no request finds the prompts that models read ahead",
            hint="--warm-scope all, or leave out warm of the models",
        )
    repository, models = served_repository(
        ctx, served, options.models, Asked(plugin, name, assignments, fit)
    )
    Store(repository=repository).recover()
    found = Repository.open(repository)
    on_demand = take_on_demand(ctx, options)
    offered = offered_models(found, models, on_demand) if on_demand else []
    host = options.host
    settings = ServerSettings(
        repository=repository,
        host=host_of_triton(host, open_triton=options.open_triton),
        models=found.with_parts(models),
        renewable=True,
        partial=True,
        mounts=tuple(map(Path, found.references())),
        texts=file.texts if file is not None else {},
        warm_prompts=warm_prompts,
        extra_args=triton_arguments(options.triton_flags),
        env=_warm(options),
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
    settings, left_out = _checked(settings, frontends, on_demand, host)
    for other in find_servers(repository=repository):
        _notify(
            f"note: {other.process()} serves {repository} too, at {other.url}: what is built anew "
            "is reloaded in each by itself"
        )
    # Before the pinned models are loaded, which are part of it.
    on_demand = on_demand and limited(on_demand)
    # Imported only now, so that problems are reported in less than a second.
    from llmserve.server import start_serving

    # SIGTERM comes from service managers. SIGINT must work in a background job too.
    raise_on_interrupt(signal.SIGTERM, signal.SIGINT)
    with ExitStack() as stack:
        with Status("starting Triton") as status:
            up = stack.enter_context(
                start_serving(
                    settings, frontends.places, models=models, left_out=left_out,
                    on_demand=on_demand, offered=offered,
                    on_progress=lambda progress: status.update(str(progress)),
                    notify=lambda line: status.note(f"llmserve: {line}"),
                )
            )  # fmt: skip
        click.echo(_summary(up, offered), err=True)
        for note in up.servers[0].notes:
            click.echo(f"llmserve: note: {note}", err=True)
        # Until signals are handled there, Ctrl-C raises an exception, and there is nothing to
        # wait for yet.
        with suppress(KeyboardInterrupt):
            up.run(_notify)
        if wrong := up.went_wrong:
            logs = ", ".join(map(str, up.log_files))
            _notify(f"not everything went well ({'; '.join(wrong)}): the log is in {logs}")


def _warm(options: ServeOptions) -> dict[str, str]:
    """Return what tells engines where to keep pages of their caches, if they are to keep any."""
    from llmserve.plugin import pages_folder

    if not options.warm:
        return {}
    if options.runtime == "docker":
        raise UsageError(
            "--warm keeps pages on this machine, which a container does not see",
            hint="use --runtime embedded or binary",
        )
    return {WARM: str(pages_folder()), WARM_BYTES: str(int(options.warm * _GB))}


def _refuse_missing_keys(keys: Path | None) -> None:
    """Refuse a file of keys that is not there, before anything is built."""
    if keys is not None and not keys.exists():
        raise UsageError(
            f"there is no file of keys {keys}", hint=f"llmserve key new NAME --file {keys}"
        )


def _notify(line: str) -> None:
    # If stderr is closed, the server must continue.
    with suppress(OSError):
        # The line may quote a log, into which anybody may have written.
        click.echo(f"llmserve: {printable(line)}", err=True)


def _checked(
    settings: ServerSettings,
    frontends: RequestedFrontends,
    on_demand: OnDemand | None,
    host: str,
) -> tuple[ServerSettings, Mapping[str, str]]:
    """Complete the settings, and report all problems that would prevent a start, at once.

    Return also the models that cannot be served, and why; the settings are without them.
    """
    from llmserve.server import check_settings

    checked = check_settings(settings, on_demand, notify=_notify)
    settings, problems = checked.settings, checked.problems
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
    return settings, checked.left_out


def _lines_of_frontends(up: Serving) -> Iterator[str]:
    for front in up.frontends:
        open_to = reach(front.place.host, keys=front.place.keys is not None)
        yield f"  {front.frontend.name:<8} {front.url}{open_to}"
        if front.page_url:
            yield f"  page     {front.page_url}{open_to}"


def _summary(up: Serving, offered: Sequence[str]) -> str:
    server, *others = up.servers
    models = sorted(name for name, state in server.models().items() if state == "READY")
    by_backend: dict[str, list[str]] = {}
    for model, backend in sorted(server.stand_ins().items()):
        by_backend.setdefault(backend, []).append(model)
    open_to = reach(server.ports.host, keys=False)
    return "\n".join(
        [
            f"{server.runtime}, log in {server.log_file}",
            *_lines_of_frontends(up),
            f"  http     {server.http_url}{open_to}",
            f"  grpc     {server.grpc_url}{open_to}",
            f"  metrics  {server.metrics_url}{open_to}",
            *(f"  replica  grpc {s.grpc_url}, log in {s.log_file}" for s in others),
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
