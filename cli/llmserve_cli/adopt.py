"""``llmserve adopt``."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from llmserve.commands import check_file, print_json, printable
from llmserve.errors import OutputError, UsageError
from llmserve_cli.building import PLUGIN

SERVER_FILE = "llmserve.toml"


class Adopt(click.Command):
    """The command, which takes a command line as it is, with options of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(args) > 1 and not args[0].startswith("-") and not _is_path(args[0]):
            args = ["--", *args]
        return super().parse_args(ctx, args)


def _is_path(word: str) -> bool:
    # A command with blanks in it is one text, as a path is one word.
    return " " in word.strip() or "\n" in word or Path(word).expanduser().exists()


@click.command(cls=Adopt)
@click.argument("source", nargs=-1, required=True)
@PLUGIN
@click.option(
    "--model",
    help="Build the model from this, if it is not where the old server had it: a folder, a GGUF "
    "file, an id on the hub, or demo.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(SERVER_FILE),
    show_default=True,
    help="The file to write.",
)
@click.option("--dry-run", is_flag=True, help="Print what would change, and write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option(
    "--compare",
    metavar="[NAME@]URL",
    help="Then build it, and ask the old server at this address and the new one the same: their "
    "answers side by side, and the speed of both.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --compare: a file with a prompt in each line, or with requests of OpenAI's API "
    "as JSON lines, or vLLM's log.",
)
@click.option("--chat", is_flag=True, help="With --compare: send each prompt as a chat message.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("adopt-report"),
    show_default=True,
    metavar="DIR",
    help="With --compare: the folder of the report.",
)
@click.pass_context
def adopt(
    ctx: click.Context,
    source: tuple[str, ...],
    plugin: str | None,
    model: str | None,
    out: Path,
    dry_run: bool,
    force: bool,
    as_json: bool,
    compare: str | None,
    prompts: Path | None,
    chat: bool,
    report: Path,
) -> int:
    """Take over another server's settings.

    SOURCE is a Triton model repository, a file of Docker compose, Kubernetes, KServe or Ray Serve,
    a shell script, Ollama's Modelfile or store, a configuration of OpenVINO Model Server, or a
    command line itself after --, as of vllm serve, TGI, trtllm-serve or llama-server. It is read,
    and nothing of it is run.

    It writes llmserve.toml, where each line says what it comes from, for `llmserve serve`. What has
    no equal is listed with what comes next to it. Secrets are not written. The exit code is 8 if
    --compare finds answers that differ by more than rounding.

    \b
    llmserve adopt compose.yaml
    llmserve adopt -- vllm serve Qwen/Qwen3-0.6B --max-model-len 4096 --port 8000
    llmserve adopt ./my-triton-repository --dry-run
    llmserve adopt ~/.ollama
    llmserve adopt compose.yaml --compare http://127.0.0.1:8000/v1 --prompts prompts.txt
    """
    from llmserve.plugin import Registry
    from llmserve_cli.adopting.choice import choose_plugins
    from llmserve_cli.adopting.readers import read_any
    from llmserve_cli.adopting.server_file_text import (
        remark_lines,
        secret_lines,
        server_file_text,
    )

    if compare is None and (prompts or chat):
        raise UsageError("--prompts and --chat are for --compare", hint="give --compare URL")
    if compare and (dry_run or as_json):
        raise UsageError("--compare builds and serves", hint="leave out --dry-run and --json")
    adopted = read_any(source, Path.cwd())
    if model is not None and len(adopted.models) != 1:
        raise UsageError(
            f"--model is for one model, and there are {len(adopted.models)}",
            hint=f"write their sources into {out}",
        )
    choose_plugins(adopted, Registry.load(), plugin=plugin, source=model)
    text = server_file_text(adopted, out.absolute().parent)
    for line in (*remark_lines(adopted), *secret_lines(adopted)):
        click.echo(printable(line), err=True)
    if as_json:
        print_json(_as_json(adopted))
    if dry_run:
        click.echo(_difference(out, text), nl=False)
        return 0
    if not adopted.models and adopted.repository is None:
        click.echo("nothing is written: no model of it is built anew", err=True)
        return 0
    if out.exists() and not force:
        raise OutputError(
            f"{out} is there already", hint="see what would change with --dry-run, or give --force"
        )
    check_file(out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from None
    if not as_json:
        click.echo(out)
    if compare is not None:
        from llmserve_cli.adopting.comparison import Asked, compare_with_old

        asked = Asked(compare, prompts, chat=chat, report=report)
        return compare_with_old(ctx, out, adopted, asked)
    click.echo(f"next: llmserve serve --config {out}", err=True)
    return 0


def _difference(out: Path, text: str) -> str:
    before = []
    if out.is_file():
        before = out.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    lines = difflib.unified_diff(before, text.splitlines(keepends=True), str(out), f"{out} (new)")
    return printable("".join(lines))


def _as_json(adopted: object) -> object:
    from dataclasses import asdict

    return asdict(adopted)  # type: ignore[call-overload]
