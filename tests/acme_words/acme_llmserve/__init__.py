"""A plugin as an outsider writes it: one component, one recipe, one command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve import hookimpl
from llmserve.roles import Option, Recipe, Tokenizer

if TYPE_CHECKING:
    import click

    from llmserve.builder.context import BuildContext


@hookimpl
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:
    """Register a byte-pair tokenizer that needs no transformers."""
    return [
        Tokenizer(
            name="acme-bpe",
            summary="Byte pairs from a tokenizer.json, in plain Python",
            runtime="acme_llmserve.bpe:BytePairs",
            prepare=_prepare,
            options=(Option("acme_lowercase", False, "Write every prompt in small letters."),),
            requires=("acme-llmserve",),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    """Register what ``build --plugin acme`` selects."""
    return [
        Recipe(
            name="acme",
            summary="Hugging Face models behind Acme's tokenizer",
            tokenizer="acme-bpe",
            generator="transformers",
            batching="dynamic",
            formatter="text",
            defaults={"max_batch_size": 4},
        )
    ]


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    """Add ``llmserve acme-hello``."""
    import click

    @cli.command("acme-hello")
    def hello() -> None:
        """Say hello from Acme."""
        click.echo("hello from acme")


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    files = [context.source.path / "tokenizer.json"]
    return {**context.place(files, "acme"), "lowercase": context.options["acme_lowercase"]}
