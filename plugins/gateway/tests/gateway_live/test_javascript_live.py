"""Clients of JavaScript, unchanged: Vercel's AI SDK, OpenAI's and Ollama's."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.testing import LiveTriton
from llmserve.testing.tiny_seeing import picture, save_seeing

from .process import Gateway

pytestmark = pytest.mark.long

VERCEL = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7")
PACKAGES = (*VERCEL, "openai@7.59.0", "ollama@0.6.4")
ANSWER = "The capital of Japan is Tokyo."

VERCELS = """
import { createOpenAI } from '@ai-sdk/openai'
import { Output, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [baseURL, name] = process.argv.slice(2)
const sent = []
const noting = (url, init) => (sent.push(JSON.parse(init.body)), fetch(url, init))
const openai = createOpenAI({ baseURL, apiKey: 'none', fetch: noting })
const shared = { model: openai(name), maxRetries: 0, maxOutputTokens: 24 }
const prompt = 'What is the capital of Japan?'

const whole = await generateText({ ...shared, prompt })
const streamed = streamText({ ...shared, prompt })
let pieces = 0, text = ''
for await (const piece of streamed.textStream) { pieces += 1; text += piece }
const streamedUsage = await streamed.usage

const previousResponseId = whole.providerMetadata.openai.responseId
const next = await generateText({
  ...shared, prompt: 'And where do foxes live?',
  providerOptions: { openai: { previousResponseId } },
})

const turned = await generateText({
  ...shared,
  messages: [
    { role: 'user', content: prompt }, ...whole.response.messages,
    { role: 'user', content: 'And where do foxes live?' },
  ],
})

const weather = tool({
  description: 'The weather of a city',
  inputSchema: z.object({ city: z.enum(['Tokyo', 'Paris']) }),
  execute: async ({ city }) => ({ city, degrees: 21 }),
})
const stepped = await generateText({
  ...shared, prompt, tools: { weather }, maxOutputTokens: 64, stopWhen: stepCountIs(2),
  providerOptions: { openai: { parallelToolCalls: false } },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : 'required' }),
})

const city = z.object({ city: z.enum(['Tokyo', 'Paris']) })
const formed = await generateText({ ...shared, prompt, output: Output.object({ schema: city }) })

const refused = await generateText({ ...shared, model: openai('none'), prompt }).catch(e => e)
console.log(JSON.stringify({
  whole: { text: whole.text, usage: whole.usage, reason: whole.finishReason },
  streamed: { text, pieces, usage: streamedUsage },
  next: { text: next.text, input: next.usage.inputTokens },
  turned: { text: turned.text, input: turned.usage.inputTokens },
  steps: stepped.steps.map(step => ({
    calls: step.toolCalls.map(call => call.input), results: step.toolResults.map(r => r.output),
    text: step.text, reason: step.finishReason, tokens: step.usage,
  })),
  formed: formed.output,
  refused: { name: refused.name, status: refused.statusCode, message: refused.message },
  sent,
}))
"""


OPENAIS = """
import OpenAI from 'openai'

const [root, model, image] = process.argv.slice(2)
const openai = new OpenAI({ baseURL: root + '/v1', apiKey: 'none', maxRetries: 0 })
const url = 'data:image/png;base64,' + image
const shared = { model, max_tokens: 4, temperature: 0 }
const content = [{ type: 'image_url', image_url: { url } }, { type: 'text', text: 'What?' }]
const messages = [{ role: 'user', content }]
const whole = await openai.chat.completions.create({ ...shared, messages })
let streamed = ''
const parts = await openai.chat.completions.create({ ...shared, messages, stream: true })
for await (const part of parts)
  streamed += part.choices[0]?.delta?.content ?? ''
const input = [{ role: 'user', content: [
  { type: 'input_image', image_url: url, detail: 'auto' }, { type: 'input_text', text: 'What?' }] }]
const response = await openai.responses.create({
  model, input, max_output_tokens: 4, temperature: 0, store: false })
const two = { ...shared, messages: [{ role: 'user', content: [content[0], ...content] }] }
const counted = await openai.chat.completions.create(two)
const cut = [{ role: 'user', content: [{ ...content[0], image_url: { url: url.slice(0, 90) } }] }]
const refused = await openai.chat.completions.create({ ...shared, messages: cut }).catch(e => e)
console.log(JSON.stringify({
  texts: [whole.choices[0].message.content, streamed, response.output_text],
  tokens: [whole.usage.prompt_tokens, counted.usage.prompt_tokens],
  refused: { status: refused.status, message: refused.message },
}))
"""

OLLAMAS = """
import { Ollama } from 'ollama'

const [host, model, seeing, image] = process.argv.slice(2)
const ollama = new Ollama({ host })
const options = { num_predict: 4, temperature: 0 }
const messages = [{ role: 'user', content: 'What is the capital of Japan?' }]
const whole = await ollama.chat({ model, messages, options })
let text = '', last
for await (const part of await ollama.chat({ model, messages, options, stream: true })) {
  text += part.message.content
  last = part
}
const generated = await ollama.generate({ model, prompt: 'Hi', options })
const { models } = await ollama.list()
const shown = await Promise.all([ollama.show({ model }), ollama.show({ model: seeing })])
const refused = await ollama.chat({ model: 'none', messages }).catch(e => e)
const seen = [{ role: 'user', content: 'What?', images: [image] }]
const answer = await ollama.chat({ model: seeing, messages: seen, options })
console.log(JSON.stringify({
  whole, text, last, generated, models: models.map(each => each.name),
  capabilities: shown.map(each => each.capabilities),
  refused: refused.status_code, seen: answer.message.content,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages are; a machine without npm or a registry skips these tests."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("clients of JavaScript need node and npm")
    folder = tmp_path_factory.mktemp("javascript")
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline")
    installed = subprocess.run(
        [npm, "install", *options, "--prefix", folder, *PACKAGES],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"npm cannot install the clients: {installed.stderr[-300:]}")
    return folder


def said_by(script: str, folder: Path, *arguments: str) -> Any:
    """Run a script beside the packages; return what it prints."""
    (folder / "client.mjs").write_text(script, encoding="utf-8")
    command = ["node", "client.mjs", *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def seeing(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> str:
    return triton.build("hf", str(save_seeing("llava", tmp_path_factory.mktemp("seeing"))))


@pytest.fixture(scope="module")
def image() -> str:
    file = io.BytesIO()
    picture(6, 24, 16).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def description(triton: LiveTriton, seeing: str, image: str) -> str:
    """What Triton's own client is told of the image."""
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    return triton.client.generate(
        seeing, messages=[{"role": "user", "content": content}], max_tokens=4,
        image_url=[f"data:image/png;base64,{image}"],
    ).text  # fmt: skip


@pytest.fixture(scope="module")
def keeping(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that keeps responses."""
    process = Gateway(triton, "--responses", str(tmp_path_factory.mktemp("responses")))
    yield process
    assert process.stop() == 0


def test_vercels_client_with_its_default(folder: Path, keeping: Gateway, model: str) -> None:
    said = said_by(VERCELS, folder, keeping.url, model)
    whole = said["whole"]
    assert (whole["text"], whole["reason"]) == (ANSWER, "stop")
    assert said["streamed"]["text"] == ANSWER
    for field in ("inputTokens", "outputTokens"):
        assert said["streamed"]["usage"][field] == whole["usage"][field] > 0
    # The second question was read after the first and its answer.
    assert said["next"]["input"] > whole["usage"]["inputTokens"] + whole["usage"]["outputTokens"]
    assert len(said["steps"]) == 2, said["steps"]
    first, second = said["steps"]
    assert first["calls"]
    assert first["calls"][0]["city"] in ("Tokyo", "Paris")
    assert first["results"] == [{**call, "degrees": 21} for call in first["calls"]]
    assert not second["calls"]
    assert said["formed"]["city"] in ("Tokyo", "Paris")
    assert (said["refused"]["name"], said["refused"]["status"]) == ("AI_APICallError", 404)
    # It sends the id of what was answered instead of its text, and the model reads the same.
    assert said["turned"] == said["next"]
    items = [item for body in said["sent"] for item in body["input"]]
    assert any(item.get("type") == "item_reference" for item in items), said["sent"]
    assert not any("store" in body for body in said["sent"])


def test_openais_client_shows_images(
    folder: Path, keeping: Gateway, seeing: str, image: str, description: str
) -> None:
    said = said_by(OPENAIS, folder, keeping.root, seeing, image)
    assert said["texts"] == [description] * 3
    one, two = said["tokens"]
    assert two - one == 16, "so many tokens stand for an image"
    assert said["refused"]["status"] == 400
    assert "image 1 is" in said["refused"]["message"]


def test_ollamas_client_chats_and_shows_images(
    folder: Path, keeping: Gateway, model: str, seeing: str, image: str, description: str
) -> None:
    said = said_by(OLLAMAS, folder, keeping.root, model, seeing, image)
    assert said["text"] == said["whole"]["message"]["content"] != ""
    assert said["last"]["done"]
    assert said["last"]["eval_count"] == said["whole"]["eval_count"] == 4
    assert said["generated"]["done"]
    assert {f"{model}:latest", f"{seeing}:latest"} <= set(said["models"])
    plain, sees = said["capabilities"]
    assert "completion" in plain
    assert "vision" in sees
    assert "vision" not in plain
    assert said["refused"] == 404
    assert said["seen"] == description
