"""``llmserve query`` of models that answer with values: vectors, scores, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.commands import print_json
from llmserve.errors import OutputError, UsageError
from llmserve.runtime.contract import CLASSIFY, EMBED, EMBEDDING, OPTIONS, RERANK, task_of
from llmserve_cli.terminal import echo_answer

if TYPE_CHECKING:
    from llmserve.client import Client, Computed, ModelInfo

# What `query` sets for every model; one that answers with values does not take it.
_OF_TOKENS = {name: f"--{name.replace('_', '-')}" for name in OPTIONS} | {"stop_words": "--stop"}


@dataclass(frozen=True)
class Asked:
    """What was asked on the command line."""

    texts: Sequence[str]
    pairs: Sequence[str]
    options: Mapping[str, Any]
    as_json: bool
    npy: Path | None


def query_values(client: Client, info: ModelInfo, asked: Asked) -> None:
    """Ask a model for its values and print them."""
    for name, value in asked.options.items():
        if value is not None and name not in info.inputs and name != "queue_timeout":
            flag = _OF_TOKENS.get(name, name)
            raise UsageError(f"{info.name} {task_of(info.task).does}", hint=f"leave out {flag}")
    if asked.npy and info.task != EMBED:
        raise UsageError(f"{info.name} computes no embeddings", hint="leave out --npy")
    _SHOW.get(info.task, _show_all)(client, info.name, asked)


def _show_embeddings(client: Client, model: str, asked: Asked) -> None:
    computed = client.compute(model, list(asked.texts), **asked.options)
    if asked.npy:
        import numpy as np

        try:
            with asked.npy.open("wb") as file:
                np.save(file, computed.outputs[EMBEDDING.name])
        except OSError as error:
            raise OutputError(f"{asked.npy} cannot be written: {error.strerror}") from None
        count, size = computed.outputs[EMBEDDING.name].shape
        click.echo(f"{asked.npy}: {count} x {size} numbers", err=True)
        return
    for row in _rows(computed):
        if asked.as_json:
            print_json(row, indent=None)
        else:
            click.echo(" ".join(f"{number:.6g}" for number in row[EMBEDDING.name]))


def _show_ranking(client: Client, model: str, asked: Asked) -> None:
    if asked.pairs:
        queries, documents = asked.texts, asked.pairs
    else:
        queries, documents = asked.texts[:1], asked.texts[1:]
    if len(queries) != 1 or not documents:
        raise UsageError(
            f"{model} ranks documents by a query", hint="give each document with --pair"
        )
    for ranked in client.rerank(model, queries[0], list(documents), **asked.options):
        if asked.as_json:
            fields = {"index": ranked.index, "score": ranked.score, "document": ranked.document}
            print_json(fields, indent=None)
        else:
            echo_answer(f"{ranked.score:9.4f}  {' '.join(ranked.document.split())}")


def _show_labels(client: Client, model: str, asked: Asked) -> None:
    texts, pairs = _paired(asked)
    for labels in client.classify(model, texts, pairs=pairs, **asked.options):
        if asked.as_json:
            fields = {"label": labels.label, "probability": labels.probability}
            print_json({**fields, "probabilities": dict(labels.probabilities)}, indent=None)
        else:
            found = [f"{label} {share:.4f}" for label, share in labels.probabilities.items()]
            echo_answer(", ".join(found))


def _show_all(client: Client, model: str, asked: Asked) -> None:
    """Print whatever a plugin's model returns."""
    texts, pairs = _paired(asked)
    for row in _rows(client.compute(model, texts, pairs=pairs, **asked.options)):
        print_json(row, indent=None)


_SHOW: Mapping[str, Callable[[Client, str, Asked], None]] = {
    EMBED: _show_embeddings,
    RERANK: _show_ranking,
    CLASSIFY: _show_labels,
}


def _paired(asked: Asked) -> tuple[list[str], list[str] | None]:
    """Return a text for each second text."""
    if not asked.pairs:
        return list(asked.texts), None
    texts = [text for text in asked.texts for _ in asked.pairs]
    return texts, list(asked.pairs) * len(asked.texts)


def _rows(computed: Computed) -> Iterator[dict[str, Any]]:
    """Yield the values of each text, and how many tokens it has."""
    columns = {name: array.tolist() for name, array in computed.outputs.items()}
    if computed.input_tokens is not None:
        columns["input_tokens"] = list(computed.input_tokens)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))
