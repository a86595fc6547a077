"""Clients of Ollama, unchanged, against a gateway that runs.

    python -m venv build/clients
    build/clients/bin/pip install ollama langchain-ollama
    npm install --prefix build/clients ollama
    build/clients/bin/python tests/ollama_clients.py http://127.0.0.1:8080 MODEL [EMBEDDER]

It needs nothing of llmserve. What these send and read without a model of their own is tested in
plugins/gateway/tests/test_gateway_ollama.py. The client of JavaScript is left out where there is
no node, and its packages are looked for beside the Python that runs this.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Tokyo", "Paris"]}},
    "required": ["city"],
}
FEW = {"num_predict": 8, "temperature": 0}
_NEAR = 1e-5

_JAVASCRIPT = """
import { Ollama } from 'ollama'
const [host, model] = process.argv.slice(2)
const ollama = new Ollama({ host })
const messages = [{ role: 'user', content: 'What is the capital of Japan?' }]
const options = { num_predict: 8, temperature: 0 }
const whole = await ollama.chat({ model, messages, options })
let text = '', last
for await (const part of await ollama.chat({ model, messages, options, stream: true })) {
  text += part.message.content
  last = part
}
if (text !== whole.message.content || !last.done || last.eval_count !== whole.eval_count)
  throw new Error(JSON.stringify([text, whole, last]))
const generated = await ollama.generate({ model, prompt: 'Hi', options })
if (!generated.done || !generated.response) throw new Error(JSON.stringify(generated))
const { models } = await ollama.list()
if (!models.some(each => each.name === model + ':latest')) throw new Error(JSON.stringify(models))
const shown = await ollama.show({ model })
if (!shown.capabilities.includes('completion')) throw new Error(JSON.stringify(shown))
let refused
await ollama.chat({ model: 'none', messages }).catch(error => { refused = error })
if (refused?.status_code !== 404) throw new Error(String(refused))
"""

Check = Callable[[str, str, str], None]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(name: str, package: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = package, function
        return function

    return add


def of(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def client_of(root: str) -> Any:
    return of("ollama", "Client")(host=root)


def refusal_of(call: Callable[[], Any]) -> Any:
    try:
        call()
    except of("ollama", "ResponseError") as error:
        return error
    raise AssertionError("it was not refused")


@check("ollama: chat and generate, whole and in lines", "ollama")
def turns(root: str, model: str, embedder: str) -> None:
    client = client_of(root)
    whole = client.chat(f"{model}:latest", MESSAGES, options=FEW)
    assert whole.done
    assert whole.done_reason == "length"
    assert whole.eval_count == FEW["num_predict"]
    parts = list(client.chat(model, MESSAGES, options=FEW, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].eval_count, parts[-1].done) == (whole.eval_count, True)
    raw = client.generate(model, "The capital of Japan is", raw=True, options=FEW)
    pieces = client.generate(model, "The capital of Japan is", raw=True, options=FEW, stream=True)
    assert "".join(piece.response for piece in pieces) == raw.response != ""
    assert client.generate(model, "").done_reason == "load"


@check("ollama: the form of an answer, tools and log-probabilities", "ollama")
def forms(root: str, model: str, embedder: str) -> None:
    client = client_of(root)
    answer = client.chat(model, MESSAGES, format=SCHEMA, options={"num_predict": 64})
    assert json.loads(answer.message.content).keys() == {"city"}

    def get_weather(city: str) -> str:
        """Look up the weather.

        Args:
            city: Where.
        """
        return city

    client.chat(model, MESSAGES, tools=[get_weather], options=FEW)
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "get_weather", "arguments": {"city": "Tokyo"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "Sunny."},
    ]  # fmt: skip
    assert client.chat(model, history, tools=[get_weather], options=FEW).done
    told = client.chat(model, MESSAGES, options=FEW, logprobs=True, top_logprobs=2)
    assert len(told.logprobs) == FEW["num_predict"]
    assert len(told.logprobs[0].top_logprobs) == 2


@check("ollama: models, and what is refused", "ollama")
def models(root: str, model: str, embedder: str) -> None:
    client = client_of(root)
    assert f"{model}:latest" in [each.model for each in client.list().models]
    assert f"{model}:latest" in [each.model for each in client.ps().models]
    shown = client.show(model)
    assert "completion" in shown.capabilities
    assert client.pull(model).status == "success"
    assert [each.status for each in client.pull(model, stream=True)] == ["success"]
    for call, status in (
        (lambda: client.chat("none", MESSAGES), 404),
        (lambda: list(client.chat("none", MESSAGES, stream=True)), 404),
        (lambda: client.pull("none"), 404),
        (lambda: client.chat(model, MESSAGES, think=True), 400),
        (lambda: client.chat(model, MESSAGES, options={"num_predict": "x"}), 400),
    ):
        found = refusal_of(call)
        assert found.status_code == status
        assert not found.error.startswith("{")


@check("ollama: embeddings", "ollama")
def embeddings(root: str, model: str, embedder: str) -> None:
    client = client_of(root)
    first, second = client.embed(embedder, ["a server answers", "Tokyo"]).embeddings
    alone = client.embeddings(embedder, "Tokyo").embedding
    assert len(first) == len(second)
    assert all(abs(a - b) < _NEAR for a, b in zip(second, alone, strict=True))


@check("langchain: ChatOllama", "langchain-ollama")
def chat_ollama(root: str, model: str, embedder: str) -> None:
    make = of("langchain_ollama", "ChatOllama")
    chat = make(model=model, base_url=root, num_predict=8, temperature=0,
                validate_model_on_init=True)  # fmt: skip
    question = MESSAGES[0]["content"]
    whole = chat.invoke(question)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == FEW["num_predict"]
    assert "".join(chunk.content for chunk in chat.stream(question)) == whole.content
    formed = make(model=model, base_url=root, temperature=0, num_predict=64)
    schema = {"title": "Place", "description": "A place.", **SCHEMA}
    found = formed.with_structured_output(schema, method="json_schema").invoke(question)
    assert found.keys() == {"city"}


@check("langchain: OllamaLLM", "langchain-ollama")
def text_ollama(root: str, model: str, embedder: str) -> None:
    made = of("langchain_ollama", "OllamaLLM")(model=model, base_url=root, num_predict=8)
    assert "".join(made.stream("Hi")) == made.invoke("Hi") != ""


@check("langchain: OllamaEmbeddings", "langchain-ollama")
def vectors(root: str, model: str, embedder: str) -> None:
    made = of("langchain_ollama", "OllamaEmbeddings")(model=embedder, base_url=root)
    first, second = made.embed_documents(["a server answers", "Tokyo"])
    assert len(first) == len(second) == len(made.embed_query("x"))


def javascript(root: str, model: str) -> str:
    """Return what the client of JavaScript says that is wrong."""
    folder = Path(sys.prefix)
    script = folder / "ollama_client.mjs"
    script.write_text(_JAVASCRIPT, encoding="utf-8")
    ended = subprocess.run(["node", script, root, model], capture_output=True, text=True)
    return ended.stderr


def main() -> None:
    root, model, *others = sys.argv[1:]
    failed = False
    for name, (package, function) in CHECKS.items():
        if not others and "mbedding" in name:
            print(f"{name}: left out, as no embedder is named")
            continue
        try:
            function(root, model, *others or [""])
        except Exception:
            traceback.print_exc()
            failed = True
            print(f"{name} ({package} {version(package)}): FAILED")
        else:
            print(f"{name} ({package} {version(package)}): ok")
    packages = Path(sys.prefix) / "node_modules" / "ollama" / "package.json"
    if shutil.which("node") and packages.exists():
        found = json.loads(packages.read_text(encoding="utf-8"))["version"]
        wrong = javascript(root, model)
        failed = failed or bool(wrong)
        print(f"ollama-js ({found}): {'FAILED' if wrong else 'ok'}", wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
