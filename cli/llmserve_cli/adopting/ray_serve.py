"""Reads the YAML of Ray Serve LLM, alone or in a RayService of Kubernetes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from llmserve_cli.adopting.adopted import Adopted, Origin, Value, shown
from llmserve_cli.adopting.engines import engine_named
from llmserve_cli.adopting.launch import Launch, adopt_launch
from llmserve_cli.adopting.source_text import SourceText
from llmserve_cli.adopting.words import Word
from llmserve_cli.adopting.yaml_nodes import Node, read_yaml


def is_ray_serve(documents: Sequence[Node]) -> bool:
    return any(each.get("applications") or _embedded(each) for each in documents)


def _embedded(document: Node) -> Node | None:
    paths = (("spec", "serveConfigV2"), ("spec", "rayClusterConfig", "serveConfigV2"))
    return next((node for path in paths if (node := document.get(*path)) is not None), None)


def read_ray_serve(source: SourceText, documents: Sequence[Node]) -> Adopted:
    """Read the models of each application."""
    adopted = Adopted("a configuration of Ray Serve")
    for found, offset in _configurations(source, documents):
        for application in found.list_at("applications"):
            _read_application(source, application, offset, adopted)
        for key in ("port", "host"):
            node = found.get("http_options", key)
            if node is not None and node.text is not None:
                origin = Origin(source.name, node.line + offset, f"http_options.{key} {node.text}")
                if key == "port" and node.text.isdecimal():
                    adopted.gateway["port"] = Value(int(node.text), origin)
                elif key == "host" and node.text not in ("127.0.0.1", "localhost"):
                    adopted.miss(origin, "[serve] host, with [gateway] keys: llmserve key new NAME")
    return adopted


def _configurations(source: SourceText, documents: Sequence[Node]) -> Iterator[tuple[Node, int]]:
    """Yield each configuration, and how many lines stand before it in the file."""
    for document in documents:
        if document.get("applications"):
            yield document, 0
        elif (node := _embedded(document)) is not None and node.text:
            # The text begins in the line after the mark of a block.
            inner = SourceText(source.name, node.text, source.folder)
            for found in read_yaml(inner):
                yield found, node.line


def _read_application(source: SourceText, application: Node, offset: int, adopted: Adopted) -> None:
    configs = application.list_at("args", "llm_configs")
    if not configs:
        what = application.text_at("import_path") or "an application"
        origin = Origin(source.name, application.line + offset, shown("import_path", what))
        adopted.miss(
            origin, "it is a program of Python, and none is run: only llm_configs are read"
        )
    for config in configs:
        if not config.is_mapping:
            origin = Origin(source.name, config.line + offset, shown("llm_configs", config.text))
            adopted.miss(origin, "other files are not followed: adopt that one too")
            continue
        _read_model(source, config, offset, adopted)


def _read_model(source: SourceText, config: Node, offset: int, adopted: Adopted) -> None:
    vllm = engine_named("vLLM")

    def value(*path: str) -> Value | None:
        node = config.get(*path)
        if node is None or node.text is None:
            return None
        origin = Origin(source.name, node.line + offset, f"{'.'.join(path)}: {node.text}")
        return Value(node.text, origin)

    named = value("model_loading_config", "model_id")
    model = value("model_loading_config", "model_source") or named
    words = [Word("vllm", config.line + offset), Word("serve", config.line + offset)]
    arguments = config.get("engine_kwargs")
    for key, node in arguments.items() if arguments else ():
        flag, line = f"--{key.replace('_', '-')}", node.line + offset
        row = vllm.row(flag)
        plain = node.plain()
        if row is not None and not row.takes:
            words += [Word(flag, line)] if plain is True else []
        elif node.text is not None:
            words.append(Word(f"{flag}={node.text}", line))
        else:
            words.append(Word(f"{flag}={json.dumps(plain)}", line))
    launch = Launch(source, words, model=model, name=named, has_program=True, in_container=True,
                    is_open=False)  # fmt: skip
    launch.replicas = value("deployment_config", "num_replicas") or value(
        "deployment_config", "autoscaling_config", "min_replicas"
    )
    adopt_launch(launch, adopted)
    for key, says in (
        ("accelerator_type", "llmserve serves on the machine that it runs on"),
        ("runtime_env", "set its variables in the environment of llmserve serve"),
        ("lora_config", "llmserve serve --adapter-folder FOLDER"),
        ("placement_group_config", "a model is in one machine here"),
    ):
        if (other := config.get(key)) is not None:
            text = other.text or ""
            adopted.miss(Origin(source.name, other.line + offset, shown(key, text or None)), says)
