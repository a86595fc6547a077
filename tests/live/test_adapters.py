"""Adapters with what else a request may ask for, and with what measures and checks a server."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmserve
from llmserve.client import Completion
from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton, run
from llmserve.testing.tiny_adapters import merged, save_adapter

from .gateway import gateway_of
from .servers import Serving

pytestmark = pytest.mark.long

PROMPT = "Once upon a time"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}},
          "required": ["name"], "additionalProperties": False}  # fmt: skip
ASKS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True, "max_tokens": 60},
    {"json_schema": json.dumps(SCHEMA), "max_tokens": 200},
    {"temperature": 0.9, "seed": 7},
    {"stop_words": ["e"]},
    {"logprobs": 2},
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return two adapters, and the model with the first merged into it."""
    home = tmp_path_factory.mktemp("adapters")
    plain = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    one, two = (
        save_adapter(home / str(seed), plain, targets=("c_attn", "c_fc"), seed=seed, rank=8)
        for seed in range(2)
    )
    merged(plain, one).save_pretrained(home / "whole")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(home / "whole")
    return one, two, home / "whole"


@pytest.fixture(scope="module")
def model(triton: LiveTriton, adapters: tuple[Path, Path, Path]) -> str:
    return triton.build(
        "iterative", dtype="float32", device="cpu", prompt_lookup=4,
        adapters=f"one={adapters[0]},two={adapters[1]}",
    )  # fmt: skip


def test_each_answer_is_that_of_the_merged_model_whatever_is_asked(
    triton: LiveTriton, adapters: tuple[Path, Path, Path], model: str
) -> None:
    """It guesses with the adapter as well, and the merged model does not guess."""
    whole = triton.build("iterative", str(adapters[2]), dtype="float32", device="cpu")

    def answer(name: str, ask: dict[str, Any], **more: Any) -> Completion:
        return triton.client.generate(name, PROMPT, **{"max_tokens": 24, **ask, **more})

    for ask in ASKS:
        expected, found = answer(whole, ask), answer(model, ask, adapter="one")
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason), ask
        assert found.output_tokens == expected.output_tokens
        options = {"max_tokens": 24, **ask, "adapter": "one"}
        pieces = [piece.text for piece in triton.client.stream(model, PROMPT, **options)]
        assert "".join(pieces) == expected.text, ask
        if "logprobs" in ask:
            assert expected.logprobs
            for own, other in zip(found.logprobs or (), expected.logprobs, strict=True):
                assert own.token == other.token
                assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert answer(model, {}).text != answer(whole, {}).text
    assert json.loads(answer(model, ASKS[2], adapter="two").text).keys() == {"name"}


def test_bench_has_a_row_for_each_adapter_and_certify_compares_with_the_right_one(
    triton: LiveTriton, adapters: tuple[Path, Path, Path], model: str, tmp_path: Path
) -> None:
    url = ("--url", triton.server.grpc_url)
    mix = ("--adapter", "one", "--adapter", "two", "--adapter", "")
    result = tmp_path / "result.json"
    measured = run(
        "bench", model, *url, *mix, "--requests", "9", "--concurrency", "3", "--output-tokens", "8",
        "--json", str(result),
    )  # fmt: skip
    assert measured.returncode == 0, measured.stderr
    assert f"By adapter, {model}, concurrency 3" in measured.stdout
    ((case,),) = [json.loads(result.read_text())["cases"]]
    named = [record["adapter"] for record in case["runs"][0]["records"]]
    assert sorted(named) == sorted(["one", "two", ""] * 3)

    certify = ("certify", model, *url, "--against", "demo", "--only", "greedy-is-the-models",
               "--only", "log-probabilities", "--precision", "float32")  # fmt: skip
    right = run(*certify, "--adapter", f"one={adapters[0]}")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = run(*certify, "--adapter", f"one={adapters[1]}")
    assert wrong.returncode == 8, wrong.stdout + wrong.stderr
    unclear = run(*certify, "--adapter", "one")
    assert "give --adapter NAME=FOLDER with --against" in unclear.stderr


def test_the_lines_of_a_batch_name_adapters(triton: LiveTriton, model: str, tmp_path: Path) -> None:
    names = [model, f"{model}:one", f"{model}:two", "one"]
    asked = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions",
         "body": {"model": name, **asked}}
        for number, name in enumerate(names)
    ]  # fmt: skip
    with gateway_of(triton, "--batches", str(tmp_path / "batches")) as up:
        client = up.client()
        content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until = time.monotonic() + 120
        while batch.status not in ("completed", "failed", "expired") and time.monotonic() < until:
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", len(names))  # type: ignore[union-attr]
        answers = client.files.content(batch.output_file_id or "").text.splitlines()
    found = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["text"]
        for line in map(json.loads, answers)
    }
    options = {"max_tokens": 12, "ignore_eos": True}
    one, two = (
        triton.client.generate(model, PROMPT, adapter=name, **options).text
        for name in ("one", "two")
    )
    plain = triton.client.generate(model, PROMPT, **options).text
    assert found == {"0": plain, "1": one, "2": two, "3": one}
    assert len({plain, one, two}) == 3


def test_a_model_with_a_draft_and_adapters_comes_and_goes_on_demand(
    adapters: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Each of the two is unloaded for the other; the draft guesses for all adapters."""
    plain, named = str(demo_model_path()), f"one={adapters[0]},two={adapters[1]}"
    options: dict[str, Any] = {"output": tmp_path, "dtype": "float32", "device": "cpu"}
    guesses: dict[str, Any] = {"draft_model": plain, "draft_tokens": 3, "adapters": named}
    llmserve.build("iterative", plain, name="drafted", **options, **guesses)
    llmserve.build("iterative", str(adapters[2]), name="whole", **options)
    ask: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    with closing(Serving(str(tmp_path), "--on-demand", "--max-loaded", "1")) as serve:
        url = f"http://{serve.frontend[0]}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        found: dict[str, set[str]] = {}
        for name in ("drafted:one", "whole", "drafted:one", "drafted:two", "drafted"):
            answer = client.completions.create(model=name, **ask)
            found.setdefault(name, set()).add(answer.choices[0].text)
    assert found["drafted:one"] == found["whole"]
    assert {len(texts) for texts in found.values()} == {1}
    assert len(set.union(*found.values())) == 3
