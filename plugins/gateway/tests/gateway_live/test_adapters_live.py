"""Adapters of a served model: by the client, the command line and the API, while it is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmserve.errors import RequestRejectedError
from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton, run
from llmserve.testing.tiny_adapters import merged, save_adapter
from llmserve_gateway.keys import new_key

from .process import Gateway, supervising

TARGETS = ("c_attn", "c_fc")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path | None, str]]:
    """Adapters by name, and what the model says with each merged; and without one."""
    home = tmp_path_factory.mktemp("adapters")
    plain = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids

    def said(model: Any) -> str:
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    found: dict[str, tuple[Path | None, str]] = {"": (None, said(plain))}
    for seed, name in enumerate(("one", "two")):
        folder = save_adapter(home / name, plain, targets=TARGETS, seed=seed, rank=8)
        found[name] = folder, said(merged(plain, folder))
    assert len({text for _, text in found.values()}) == 3
    return found


@pytest.mark.parametrize(
    "plugin",
    ["iterative", *(pytest.param(name, marks=pytest.mark.long) for name in ("hf", "openvino"))],
)
def test_a_model_answers_with_the_adapter_that_is_named(
    plugin: str,
    triton: LiveTriton,
    gateway: Gateway,
    texts: dict[str, tuple[Path | None, str]],
    tmp_path: Path,
) -> None:
    model = triton.build(plugin, dtype="float32", device="cpu", name=f"{plugin}-a")
    repository = "--repository", str(triton.repository)

    def ask(adapter: str) -> str:
        chosen = adapter or None
        found = triton.client.generate(
            model, PROMPT, max_tokens=12, ignore_eos=True, adapter=chosen
        )
        return found.text

    # The first adapter comes while the model is served.
    assert ask("") == texts[""][1]
    assert run("adapter", "add", model, f"one={texts['one'][0]}", *repository).returncode == 0
    assert ask("one") == texts["one"][1]
    with pytest.raises(RequestRejectedError, match="has no adapter 'two'") as caught:
        ask("two")
    assert caught.value.code == "adapter_not_found"

    assert run("adapter", "add", model, f"two={texts['two'][0]}", *repository).returncode == 0
    assert ask("two") == texts["two"][1]
    assert "one " in _printed("adapter", "list", model, *repository)
    queried = _printed(
        "query", model, PROMPT, "--adapter", "two", "--max-tokens", "12", "--url",
        triton.server.grpc_url, "--set", "ignore_eos=true",
    )  # fmt: skip
    assert queried.strip("\n") == texts["two"][1]

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=f"{model}:{name}" if name else model, prompt=PROMPT, max_tokens=12,
                        extra_body={"ignore_eos": True},
                    )
                    for name in [*texts] * 3
                )
            )  # fmt: skip
        assert [a.model for a in answers[:2]] == [model, f"{model}:one"]
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(all_at_once()) == [text for _, text in texts.values()] * 3
    listed = {
        entry.id: entry for entry in gateway.client().models.list() if entry.id.startswith(model)
    }
    assert [*listed] == [model, f"{model}:one", f"{model}:two"]
    parent: Any = gateway.client().models.retrieve(f"{model}:two")
    assert parent.parent == model

    keys = tmp_path / "keys.json"
    new_key(keys, "all", models=[model])
    own = new_key(keys, "one", models=[f"{model}:one"])
    guarded = Gateway(triton, "--keys", str(keys))
    try:
        client = guarded.client(own)
        assert [entry.id for entry in client.models.list()] == [f"{model}:one", "one"]
        for name in (f"{model}:one", "one"):
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=12, extra_body={"ignore_eos": True}
            )
            assert (answer.model, answer.choices[0].text) == (name, texts["one"][1])
        for other in (model, f"{model}:two"):
            with pytest.raises(openai.PermissionDeniedError):
                client.completions.create(model=other, prompt="a", max_tokens=1)
    finally:
        assert guarded.stop() == 0

    assert run("adapter", "remove", model, "two", *repository).returncode == 0
    with pytest.raises(openai.NotFoundError, match="has no adapter 'two'") as refused:
        gateway.client().completions.create(model=f"{model}:two", prompt="a")
    assert refused.value.param == "model"


def test_requests_add_and_remove_adapters_and_harm_none_that_run(
    triton: LiveTriton, texts: dict[str, tuple[Path | None, str]], tmp_path: Path
) -> None:
    model = triton.build("iterative", dtype="float32", device="cpu", name="iterative-l")
    folder = texts["one"][0]
    assert folder is not None
    socket = tmp_path / "socket"
    with supervising(triton, socket):
        own = Gateway(triton, "--supervisor", str(socket), "--adapter-folder", str(folder.parent))
        try:
            client = own.client()

            def said(name: str, length: int = 12) -> str:
                answer = client.completions.create(
                    model=name, prompt=PROMPT, max_tokens=length, extra_body={"ignore_eos": True}
                )
                return answer.choices[0].text

            def order(do: str, **fields: Any) -> None:
                answer = own.post(f"/v1/{do}_lora_adapter", fields)
                assert answer.status_code == 200, answer.text

            name = f"{model}:late"
            with pytest.raises(openai.NotFoundError):
                said(name)
            order("load", lora_name=name, lora_path="one")
            assert said(name) == texts["one"][1]
            assert said("late") == texts["one"][1]
            assert name in [entry.id for entry in client.models.list()]
            whole = said(name, 100)
            running = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=100, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            pieces = [next(running).choices[0].text]
            order("load", lora_name=name, lora_path="two", load_inplace=True)
            assert said(name) == texts["two"][1]
            order("unload", lora_name=name)
            pieces += [chunk.choices[0].text for chunk in running]
            assert "".join(pieces) == whole
            with pytest.raises(openai.NotFoundError):
                said(name)
        finally:
            assert own.stop() == 0


def _printed(*words: str) -> str:
    result = run(*words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_model_without_adapters_has_no_name_with_one(
    gateway: Gateway, triton: LiveTriton
) -> None:
    model = triton.build("gpt2-torchscript")
    with pytest.raises(openai.NotFoundError, match="has no adapters"):
        gateway.client().completions.create(model=f"{model}:one", prompt="a")
