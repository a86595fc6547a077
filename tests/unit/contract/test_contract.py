"""The rows of the contract: all that is said of an option is in one place."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.contract.options import ALIASES, OPTIONS, RequestOption
from tests.reference import FOLDER, PAGES
from tests.trees import nodes_of
from tests.unit.test_boundaries import ROOT, module_of, sources

_WITH_A_ROW = '''
import importlib.util, json, sys, types
from pathlib import Path

spec = importlib.util.find_spec("llmserve.contract.options")
source = Path(spec.origin).read_text(encoding="utf-8")
row = """    sparkle: float = _option(
        "number", "sampling", "How bright.", 0.0, high=3, aliases=("glitter",),
        api="shine", api_range=(0, 1),
    )
"""
before, after = source.split("    min_p: float", 1)
module = types.ModuleType(spec.name)
sys.modules[spec.name] = module
exec(compile(f"{before}{row}    min_p: float{after}", spec.origin, "exec"), vars(module))

import click
import llmserve
from llmserve.client.messages import build_request
from llmserve.client.model import ModelInfo, TensorInfo
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Generator
from llmserve.runtime import RequestError, read_params
from llmserve_cli.completion import request_options
from llmserve_cli.query import query
from llmserve_gateway.document import make_document
from llmserve_gateway.errors import ApiError
from llmserve_gateway.openai_requests import read_chat
from tests.reference import options_page

def refusal(read, content):
    try:
        read(content)
    except (ApiError, RequestError) as error:
        return [error.code, error.param]

llmserve.build("hf", "demo", name="demo", output=Path(sys.argv[1]))
tensors = {n: TensorInfo(n, t, (1,)) for n, t in (("text_input", "BYTES"), ("glitter", "FP32"))}
text = {"text_output": TensorInfo("text_output", "BYTES", (1,))}
request = build_request(ModelInfo("m", "unary", True, 8, tensors, text), ["Hi"], {"sparkle": 0.5})
chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
paths = make_document([])["paths"]
schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
context = click.Context(query)
generators = Registry.load().all(Generator)
print(json.dumps({
    "generators": sorted(g.name for g in generators if "sparkle" in [t.name for t in g.inputs]),
    "config": (Path(sys.argv[1]) / "demo" / "config.pbtxt").read_text().count('"sparkle"'),
    "reader": [read_params({"sparkle": "0.5"}).sparkle, refusal(read_params, {"sparkle": 4})],
    "client": [tensor.name for tensor in request.inputs],
    "gateway": [read_chat({**chat, "shine": 0.5}).options["sparkle"],
                refusal(read_chat, {**chat, "shine": 2})[1]],
    "document": schema["schema"]["properties"]["shine"],
    "completion": request_options(context, query.params[0], "sp"),
    "page": "How bright" in options_page(),
}))
'''


def test_a_new_row_is_everywhere(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _WITH_A_ROW, str(tmp_path)],
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        # Those that sample with ours; an engine with a sampler of its own says what that can do.
        "generators": ["graph-onnx", "graph-torchscript", "openvino", "stepwise", "transformers"],
        "config": 1,
        "reader": [0.5, ["invalid_value", "sparkle"]],
        "client": ["text_input", "glitter"],
        "gateway": [0.5, "shine"],
        "document": {
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 1,
            "description": "How bright.",
        },
        "completion": ["sparkle="],
        "page": True,
    }


USES = {
    "llmserve.repository.handwritten": "tensors of models that others wrote",
    "llmserve.runtime.answer.constrained": "what it constrains with, and what conflicts with that",
    "llmserve.testing.checks": "values to try",
    "llmserve.testing.logprobs": "values to try",
    "llmserve_cli.adopting.ollama": "Ollama's own names",
    "llmserve_gateway.ollama_requests": "Ollama's own names",
    "llmserve_gateway.llama_cpp": "llama.cpp's own names",
    "llmserve_cli.adopting.triton_repository": "tensors of models that others wrote",
    "llmserve_gateway.errors": "fields that are made of several options, or of none",
    "llmserve_gateway.tracing": "OpenTelemetry's list",
}


def test_options_are_listed_only_where_they_are_used() -> None:
    names = {*OPTIONS, *ALIASES}
    packages = ["llmserve", "cli/llmserve_cli", "plugins/gateway/llmserve_gateway"]
    listing = {
        module_of(path, (ROOT / package).parent)
        for package in packages
        for path in sources(ROOT / package)
        for node in nodes_of(path)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict))
        if len(names & {*constants(node)}) > 2
    }
    assert listing == {*USES}


def constants(node: ast.List | ast.Tuple | ast.Set | ast.Dict) -> Iterator[object]:
    items = node.keys if isinstance(node, ast.Dict) else node.elts
    return (item.value for item in items if isinstance(item, ast.Constant))


@pytest.mark.parametrize("row", OPTIONS.values(), ids=OPTIONS)
def test_a_row_agrees_with_itself(row: RequestOption) -> None:
    assert row.help.endswith(".")
    assert row.low < row.high
    assert {*row.declared_aliases} <= {*row.aliases}
    if row.api_range:
        assert row.low <= row.api_range[0] <= row.api_range[1] <= row.high, "narrower"


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_what_the_contract_says(name: str) -> None:
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run python -m tests.reference"
