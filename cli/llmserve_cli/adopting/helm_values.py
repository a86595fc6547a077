"""Reads the values of the Helm chart of vLLM's production stack; those of others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llmserve.errors import ConfigError
from llmserve_cli.adopting.adopted import Adopted, Origin, Secret, Value, shown
from llmserve_cli.adopting.launch import Launch, adopt_launch
from llmserve_cli.adopting.source_text import SourceText
from llmserve_cli.adopting.words import Word
from llmserve_cli.adopting.yaml_nodes import Node

_OF_CLUSTER = {
    "name", "repository", "tag", "imagePullPolicy", "imagePullSecret", "modelURL", "replicaCount",
    "vllmConfig", "hf_token", "env", "annotations", "podAnnotations", "labels", "podLabels",
}  # fmt: skip
_PREFIXES = ("request", "limit", "pvc", "node", "toler", "init", "extraVolume", "service", "hpa")
"""What says how a container is placed and how large it is."""


def is_values(documents: Sequence[Node]) -> bool:
    return any(_models(each) or _looks_like_values(each) for each in documents)


def read_values(source: SourceText, documents: Sequence[Node]) -> Adopted:
    """Read each model of the chart as the line of ``vllm serve`` that it makes."""
    adopted = Adopted("values of vLLM's production stack")
    models = [model for document in documents for model in _models(document)]
    if not models:
        raise ConfigError(
            f"{source.name} has values of a Helm chart, which say nothing without its templates",
            hint="adopt what `helm template CHART -f VALUES` prints",
        )
    for model in models:
        adopt_launch(_launch(source, model), adopted)
        if (token := model.get("hf_token")) is not None:
            adopted.secrets.append(Secret("HF_TOKEN", Origin(source.name, token.line, "hf_token")))
        for name, node in model.items():
            if name not in _OF_CLUSTER and not name.startswith(_PREFIXES):
                origin = Origin(source.name, node.line, shown(name, node.text))
                adopted.miss(origin, "the chart means something by it that has no equal here")
    return adopted


def _models(document: Node) -> list[Node]:
    found = document.list_at("servingEngineSpec", "modelSpec")
    return [each for each in found if each.get("modelURL")]


def _looks_like_values(document: Node) -> bool:
    return bool(document.text_at("image", "repository")) and not document.get("apiVersion")


def _launch(source: SourceText, model: Node) -> Launch:
    url = model.get("modelURL")
    words = [Word(url.text or "", url.line)] if url else []
    config = model.get("vllmConfig")
    words += _options(config) if config else []
    count, name = model.get("replicaCount"), model.get("name")
    variables = {
        key: Word(value.text, value.line)
        for each in model.list_at("env")
        if (key := each.text_at("name")) and (value := each.get("value")) and value.text is not None
    }
    return Launch(
        source, words, image=Word("vllm/vllm-openai", model.line), variables=variables,
        in_container=True,
        replicas=_value(source, count, "replicaCount"),
        name=None if name is None else _value(source, name, "name"),
    )  # fmt: skip


def _options(config: Node) -> Iterator[Word]:
    for name, node in config.items():
        if name == "extraArgs":
            yield from (Word(each.text, each.line) for each in node.entries() if each.text)
            continue
        if node.text is None or name == "v1":
            continue
        flag = "--" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
        if node.text.lower() == "false":
            yield Word(f"--no-{flag[2:]}", node.line)
            continue
        yield Word(flag, node.line)
        if node.text.lower() != "true":
            yield Word(node.text, node.line)


def _value(source: SourceText, node: Node | None, name: str) -> Value | None:
    if node is None or node.text is None:
        return None
    return Value(node.text, Origin(source.name, node.line, f"{name}: {node.text}"))
