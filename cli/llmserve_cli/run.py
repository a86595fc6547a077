"""``llmserve run``: from a model's name to its answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

from llmserve.errors import ServerError, UsageError
from llmserve.runtime.contract import GENERATE, task_of
from llmserve.server import find_servers
from llmserve_cli.building import FIT, NAME, PLUGIN, SET, build_flags, build_stored
from llmserve_cli.chat import SYSTEM, note, talk
from llmserve_cli.completion import what_to_serve
from llmserve_cli.interrupts import while_importing
from llmserve_cli.options import request_option, serve_option
from llmserve_cli.serve import serve

if TYPE_CHECKING:
    from llmserve.plugin import StoredModel
    from llmserve.server import Running


@click.command()
@click.argument("model", shell_complete=what_to_serve)
@click.argument("prompt", required=False)
@PLUGIN
@NAME
@build_flags
@SET
@FIT
@click.option("--force", is_flag=True, help="Build it again, also if nothing has changed.")
@SYSTEM
@request_option("max_tokens", ours=True)
@request_option("temperature", ours=True)
@request_option("top_k", ours=True)
@request_option("top_p", ours=True)
@request_option("seed", ours=True)
@serve_option("runtime")
@click.option(
    "--port", type=int, help="Port of the OpenAI API (default: 8080, or a free one if it is taken)."
)
@click.option(
    "--serve-only", is_flag=True, help="Build and serve it as `llmserve serve` does, and no more."
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    model: str,
    prompt: str | None,
    plugin: str | None,
    name: str | None,
    assignments: tuple[str, ...],
    max_batch_size: int | None,
    dtype: str | None,
    device: str | None,
    fit: bool | None,
    force: bool,
    system: str,
    runtime: str,
    port: int | None,
    serve_only: bool,
    tokenizer: str | None,
    generator: str | None,
    batching: str | None,
    formatter: str | None,
    **options: Any,
) -> None:
    """Build a model, serve it, and talk to it.

    The model is a folder, an id on the Hugging Face hub, a GGUF file, or a name that
    `llmserve list` shows. It is built if it was not before, or if it or an option has changed.
    With a prompt, or with standard input that is no terminal, it answers that and ends; otherwise
    it begins a conversation. If it is served already, it is not served twice.

    \b
    llmserve run demo
    llmserve run gpt2 "Programming in C++ is like" --max-tokens 32
    llmserve run ./my-model --plugin hf --dtype bfloat16
    llmserve run demo --serve-only --port 9000
    """
    _refuse_unanswerable(prompt, serve_only)
    stored = build_stored(
        model, name=name, plugin=plugin, assignments=assignments, fit=fit, force=force,
        components={
            "tokenizer": tokenizer, "generator": generator, "batching": batching,
            "formatter": formatter,
        },
        max_batch_size=max_batch_size, dtype=dtype, device=device,
    )  # fmt: skip
    if serve_only:
        ctx.invoke(
            serve, served=str(stored.repository), runtime=runtime,
            frontend_port=_frontend_port(port), **_triton_ports(),
        )  # fmt: skip
        return
    _refuse_other_task(stored)
    converses = prompt is None and sys.stdin.isatty()
    with while_importing():
        from llmserve.client import connect
    with _served(stored, runtime, port, converses=converses) as (server, check):
        if converses:
            note(_where(server))
        with closing(connect(server.url)) as client:
            talk(client, stored.name, prompt, system=system, check=check, **options)


def _refuse_other_task(stored: StoredModel) -> None:
    manifest = stored.model.manifest
    if manifest is not None and manifest.task != GENERATE:
        raise UsageError(
            f"{stored.name} {task_of(manifest.task).does}, and is nobody to talk to",
            hint="serve it with --serve-only, then use llmserve query",
        )


def _refuse_unanswerable(prompt: str | None, serve_only: bool) -> None:
    if serve_only and prompt is not None:
        raise UsageError("--serve-only takes no prompt", hint="leave one of them out")
    if prompt is None and not serve_only and sys.stdin.isatty() and not sys.stdout.isatty():
        raise UsageError(
            "standard output is no terminal to have a conversation in",
            hint="give a prompt, or --serve-only",
        )


@contextmanager
def _served(
    stored: StoredModel, runtime: str, port: int | None, *, converses: bool
) -> Iterator[tuple[Running, Callable[[], None]]]:
    """Return the server that has the model: one that runs, or one for as long as the block runs."""
    from llmserve.plugin import Store
    from llmserve_cli.server_process import serving

    if (server := _already(stored)) is not None:
        if stored.is_new:
            _reload(server, stored.name)
        yield server, lambda: None
        return
    words = ["--runtime", runtime]
    if converses:
        free = _frontend_port(port)
        words += [] if free is None else ["--port", str(free)]
    else:
        words += ["--frontend", "none"]
    started = serving(stored.repository, words)
    with ExitStack() as stack:
        try:
            server, process = stack.enter_context(started)
        except ServerError as error:
            # `llmserve list` says so of a model that stays.
            Store().note(stored, error.problem)
            raise
        Store().note(stored, "")
        yield server, process.check


def _already(stored: StoredModel) -> Running | None:
    """Return a server that has this model and answers, or waits only to be loaded."""
    for server in find_servers():
        if server.serves(stored.name, stored.repository) and server.url and server.is_answering:
            return server
    return None


def _reload(server: Running, name: str) -> None:
    from llmserve.commands import Status
    from llmserve.server import ask

    click.echo(
        f"llmserve: {name} has changed, and is reloaded for all who use the server at {server.url}",
        err=True,
    )
    with Status(f"reloading {name}"):
        ask(server.socket, {"do": "reload", "model": name}, timeout=None)


def _frontend_port(port: int | None) -> int | None:
    """Return the port of the frontend that starts by default: its own one, if that is free."""
    from llmserve.plugin import Frontend, Registry

    if port is not None:
        return port
    frontends = [frontend for frontend in Registry.load().all(Frontend) if frontend.default]
    return None if all(_is_free(one.port, one.name) for one in frontends) else 0


def _triton_ports() -> dict[str, int]:
    """Return Triton's usual ports, and 0 for those that are taken: they have no options here."""
    from llmserve.server import ServerSettings

    usual = {
        f"{name}_port": getattr(ServerSettings, f"{name}_port")
        for name in ("http", "grpc", "metrics")
    }
    return {name: port if _is_free(port, name) else 0 for name, port in usual.items()}


def _is_free(port: int, name: str) -> bool:
    from llmserve.server import free_port

    try:
        free_port("127.0.0.1", port, name)
    except ServerError:
        return False
    return True


def _where(server: Running) -> str:
    frontends = [f"{each.name} {each.url}" for each in server.report.frontends]
    return ", ".join([*frontends, f"grpc {server.url}"])
