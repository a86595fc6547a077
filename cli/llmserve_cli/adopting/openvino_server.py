"""Reads the configuration of OpenVINO Model Server: ``config.json`` and ``graph.pbtxt``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError
from llmserve_cli.adopting.adopted import Adopted, Origin, Value, shown
from llmserve_cli.adopting.launch import Launch, adopt_launch
from llmserve_cli.adopting.source_text import SourceText, exists, is_inside, read_json, read_source
from llmserve_cli.adopting.words import Word

_GRAPH = "graph.pbtxt"
_CALCULATOR = re.compile(r"\b(\w+)CalculatorOptions\s*\]?")
_FIELD = re.compile(r"""(?<![\w"'])(\w+)\s*:\s*(?:"([^"\n]*)"|'([^'\n]*)'|([\w.+-]+))""")
_TASKS = {
    "LLM": "", "Embeddings": "embed", "EmbeddingsOV": "embed", "Rerank": "rerank",
    "RerankOV": "rerank",
}  # fmt: skip
_CALLED = {"models_path": "model_path", "draft_models_path": "draft_source_model",
           "device": "target_device", "normalize_embeddings": "normalize"}  # fmt: skip
"""Fields of a graph, and the option of the command line that is the same."""


def is_graph(source: SourceText) -> bool:
    match = _CALCULATOR.search(source.text)
    return match is not None and "calculator" in source.text


def read_graph(source: SourceText) -> Adopted:
    """Read a graph with one calculator for language models."""
    adopted = Adopted("a graph of OpenVINO Model Server")
    _read_graph(source, source.folder.name, adopted)
    return adopted


def _read_graph(source: SourceText, name: str, adopted: Adopted) -> None:
    match = next((m for m in _CALCULATOR.finditer(source.text) if m[1] in _TASKS), None)
    if match is None:
        adopted.miss(Origin(source.name, 0, name), "no plugin serves a graph of this kind")
        return
    words = [Word("ovms", 1)]
    before = source.text[: match.end()].count("\n")
    block = _block(source.text, match.end())
    for field in _FIELD.finditer(block):
        value = next((each for each in field.groups()[1:] if each is not None), "")
        key = _CALLED.get(field[1], field[1])
        line = before + block.count("\n", 0, field.start()) + 1
        words.append(Word(f"--{key.replace('_', '-')}={value}", line))
    if task := _TASKS[match[1]]:
        words.append(Word(f"--task={ {'embed': 'embeddings'}.get(task, task) }", before + 1))
    title = Value(name, Origin(source.name, 0, "the name of its folder"))
    adopt_launch(Launch(source, words, has_program=True, name=title, is_open=False), adopted)


def _block(text: str, start: int) -> str:
    """Return what the next braces enclose, with those in it."""
    begin = text.find("{", start)
    if begin < 0:
        return text[start:]
    depth = 0
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return text[start:]


def is_ovms_config(source: SourceText) -> bool:
    return '"model_config_list"' in source.text or '"mediapipe_config_list"' in source.text


def read_ovms_config(source: SourceText) -> Adopted:
    """Read the graphs that a configuration names, those in its own folder."""
    content = read_json(source)
    adopted = Adopted("a configuration of OpenVINO Model Server")
    for name, place, origin in _entries(source, content):
        path = source.folder / place
        graph = path if path.suffix == ".pbtxt" else path / _GRAPH
        if not is_inside(graph, source.folder):
            adopted.miss(origin, f"it is outside of this folder: adopt {graph}")
        elif exists(graph.parent, graph.name):
            _read_graph(read_source(graph, str(Path(source.name).parent / place)), name, adopted)
        else:
            adopted.miss(origin, "it has no graph of a language model: no plugin serves it")
    if not adopted.models and not adopted.unmatched:
        raise ConfigError(f"{source.name} has no model")
    return adopted


def _entries(source: SourceText, content: Any) -> Iterator[tuple[str, str, Origin]]:
    for key in ("mediapipe_config_list", "model_config_list"):
        entries = content.get(key) if isinstance(content, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            each = entry.get("config", entry) if isinstance(entry, dict) else {}
            each = each if isinstance(each, dict) else {}
            name, place = each.get("name"), each.get("graph_path") or each.get("base_path")
            if isinstance(name, str) and name:
                line = source.line_of(f'"{name}"')
                place = place if isinstance(place, str) and place else name
                yield name, place.replace("\0", ""), Origin(source.name, line, shown(key, name))
