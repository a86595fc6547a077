"""A third-party plugin: a tokenizer, an ensemble, their recipes and a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmserve.plugin import (
    Batching,
    BuildContext,
    Generator,
    Option,
    Recipe,
    Tokenizer,
    contract,
    hookimpl,
)

if TYPE_CHECKING:
    import click

    from llmserve.plugin import Assembly


@hookimpl
def llmserve_register_tokenizers() -> Sequence[Tokenizer]:
    return [
        Tokenizer(
            name="acme-bpe",
            summary="Byte pairs from a tokenizer.json",
            runtime="acme_llmserve.bpe:BytePairs",
            prepare=_prepare,
            options=(Option("acme_lowercase", False, "Convert every prompt to lower case."),),
            requires=("acme-llmserve",),
        )
    ]


@hookimpl
def llmserve_register_generators() -> Sequence[Generator]:
    return [
        Generator(
            name="acme-echo",
            summary="Repeats the prompt, as the middle of an ensemble",
            runtime="acme_llmserve.echo:Echo",
            modes=frozenset({"acme"}),
            assemble=_assemble,
            requires=("acme-llmserve",),
        )
    ]


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    return [
        Batching(
            name="acme-alone",
            summary="One request after another",
            runtime="acme_llmserve.echo:Echo",
            mode="acme",
            inputs=(contract.MAX_TOKENS,),
            options=(Option("max_batch_size", 4, "Maximum prompts in one request.", minimum=1),),
        )
    ]


@hookimpl
def llmserve_register_recipes() -> Sequence[Recipe]:
    return [
        Recipe(
            name="acme",
            summary="Hugging Face models with Acme's tokenizer",
            tokenizer="acme-bpe",
            generator="transformers",
            defaults={"max_batch_size": 4},
        ),
        Recipe(
            name="acme-echo",
            summary="An ensemble of three models",
            tokenizer="acme-bpe",
            generator="acme-echo",
            batching="acme-alone",
        ),
    ]


@hookimpl
def llmserve_register_commands(cli: click.Group) -> None:
    import click

    @cli.command("acme-hello")
    def hello() -> None:
        """Say hello from Acme."""
        click.echo("hello from acme")


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    files = [context.source.path / "tokenizer.json"]
    # Small files, copied so that Triton finds them without the hub and its cache.
    placed = context.place(files, "acme", copy=True)
    return {**placed, "lowercase": context.options["acme_lowercase"]}


def _assemble(assembly: Assembly) -> None:
    from acme_llmserve.ensemble import assemble

    assemble(assembly)
