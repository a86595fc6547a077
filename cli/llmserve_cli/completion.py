"""``llmserve completion``."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete llmserve's commands.

    \b
    eval "$(llmserve completion bash)"
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    root = ctx.find_root().command
    click.echo(kind(root, {}, "llmserve", "_LLMSERVE_COMPLETE").source())
