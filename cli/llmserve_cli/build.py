"""``llmserve build``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmserve_cli.complete import component_names, recipe_names
from llmserve_cli.flags import OWN_FLAGS, read_flags

if TYPE_CHECKING:
    from llmserve.builder import BuildResult


@click.command(context_settings=OWN_FLAGS)
@click.option(
    "--plugin",
    required=True,
    shell_complete=recipe_names,
    help="A way of serving, see `llmserve plugins`.",
)
@click.option("--model", required=True, help="A local folder, a model's id on the hub, or 'demo'.")
@click.option("--name", help="Name under which Triton serves it; by default the model's own.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("model_repository"),
    show_default=True,
    help="The model repository.",
)
@click.option("--tokenizer", shell_complete=component_names, help="Another tokenizer.")
@click.option("--batching", shell_complete=component_names, help="Another batching strategy.")
@click.option("--format", "formatter", shell_complete=component_names, help="Another formatter.")
@click.option("--max-batch-size", type=int, help="Most prompts in a batch; 0 for no batches.")
@click.option("--dtype", help="Type of the weights in memory, such as float32 or bfloat16.")
@click.option("--device", help="cpu, cuda, cuda:N, balanced or auto.")
@click.option("--chat", is_flag=True, help="Put every prompt into the model's chat template.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of `llmserve plugins NAME`; --key VALUE is the same.",
)
@click.option("--force", is_flag=True, help="Replace a model that was edited or is not ours.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@click.pass_context
def build(
    ctx: click.Context,
    plugin: str,
    model: str,
    name: str | None,
    output: Path,
    tokenizer: str | None,
    batching: str | None,
    formatter: str | None,
    max_batch_size: int | None,
    dtype: str | None,
    device: str | None,
    chat: bool,
    assignments: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Build a model into a Triton model repository, with a client that fits it.

    The folder of the model is printed; a failed build leaves the repository as it was.

    \b
    llmserve build --plugin hf --model demo
    llmserve build --plugin hf --model gpt2 --max-batch-size 16 --set decoupled=true
    llmserve build --plugin trtllm --model ./llama --engine ./llama-engine
    """
    from llmserve.builder import BuildSpec, build_spec
    from llmserve.errors import OptionError
    from llmserve.options import parse_assignments
    from llmserve_cli.ending import end_in_order
    from llmserve_cli.status import Status

    options: dict[str, object] = dict(parse_assignments(assignments))
    flags = {"max_batch_size": max_batch_size, "dtype": dtype, "device": device}
    flags |= read_flags(ctx.args)
    for key, value in [*flags.items(), ("chat", chat or None)]:
        if value is not None:
            if key in options:
                raise OptionError(f"{key} is given twice", mend="leave it out of --set")
            options[key] = value
    spec = BuildSpec(
        plugin=plugin,
        model=model,
        name=name,
        output=output,
        tokenizer=tokenizer,
        batching=batching,
        formatter=formatter,
        options=options,
        force=force,
    )
    end_in_order(signal.SIGTERM)
    with Status(f"building {spec.model_name}") as status:
        result = build_spec(spec, report=status.say)
    if as_json:
        click.echo((result.folder / "llmserve.json").read_text(encoding="utf-8"), nl=False)
    else:
        click.echo(result.folder)
        _say_what_next(result)


def _say_what_next(result: BuildResult) -> None:
    from shlex import quote

    repository = quote(str(result.repository))
    where = "" if repository == "model_repository" else f" {repository}"
    lines = [
        f"serve it:          llmserve serve{where}",
        f"or in a container: {result.docker_build}",
        f"                   {result.docker_run}",
        f'ask it:            llmserve query {result.name} "..."',
        f'                   python {quote(str(result.folder / "client.py"))} "..."',
    ]
    if result.manifest.trust_remote_code:
        lines.insert(0, "note: this model runs Python code that came with it, as you asked")
    click.echo("\n".join(lines), err=True)
