"""How adapters pass to vLLM's engine: a scripted one, so that tests know what it gets."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmserve.runtime import Generation, RequestError, run_batch
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_adapters import save_adapter
from llmserve.testing.tiny_models import make_model

from .scripted import LLMEngine, scripted  # noqa: F401

SETTINGS: dict[str, Any] = {
    "path": "model", "dtype": "float32", "device": "auto", "engine_args": {}, "adapter_mb": 1,
}  # fmt: skip

Made = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    for seed, name in enumerate(("one", "two")):
        # Each takes more than half a megabyte.
        targets = ("q_proj", "up_proj")
        save_adapter(tmp_path / "adapters" / name, model, targets=targets, seed=seed, rank=300)
    return tmp_path


@pytest.fixture
def made(scripted: type[LLMEngine], folder: Path) -> Made:  # noqa: F811
    del scripted

    def make(**changed: Any) -> Any:
        from llmserve_vllm.generator import VllmGenerator

        return VllmGenerator({**SETTINGS, **changed}, folder).stepper(ByteTokenizer())

    return make


def engine() -> LLMEngine:
    return LLMEngine.made[-1]


def ask(adapter: str = "", text: str = "abc", max_tokens: int = 3) -> Generation:
    return generation(list(text.encode()), max_tokens, adapter=adapter or None)


def sent() -> list[Any]:
    return [request.lora for request in engine().requests.values()]


def test_a_model_with_adapters_is_loaded_for_them_and_one_without_is_not(
    made: Made, folder: Path
) -> None:
    made()
    arguments = engine().vllm_config.arguments
    assert (arguments["enable_lora"], arguments["max_loras"]) == (True, 8)
    assert arguments["max_lora_rank"] == 320, "the next that vLLM takes"
    made(engine_args={"max_loras": 2, "max_lora_rank": 400})
    arguments = engine().vllm_config.arguments
    assert (arguments["max_loras"], arguments["max_lora_rank"]) == (2, 512)
    shutil.rmtree(folder / "adapters")
    made()
    assert "enable_lora" not in engine().vllm_config.arguments


def test_a_request_has_its_adapter_and_one_that_is_replaced_is_another(
    made: Made, folder: Path
) -> None:
    stepper = made(adapter_mb=100)
    for name in ("one", "", "two", "one"):
        stepper.admit(ask(name))
    first, none, second, again = sent()
    assert none is None
    assert first == again != second
    assert first.lora_path == str(folder / "adapters" / "one")
    assert sorted(engine().loras) == sorted({first.lora_int_id, second.lora_int_id})
    (folder / "adapters" / "one").rename(folder / "old")
    shutil.copytree(folder / "adapters" / "two", folder / "adapters" / "one")
    stepper.admit(ask("one"))
    other = sent()[-1]
    assert other.lora_path == first.lora_path
    assert other.lora_int_id not in (first.lora_int_id, second.lora_int_id)
    assert other.lora_name != first.lora_name, "vLLM shares what it computed by the name"


def test_requests_wait_for_memory_and_all_get_their_turn(made: Made) -> None:
    stepper = made()
    asked = [ask(name) for name in ("one", "two", "one", "", "two", "one")]
    for one in asked:
        stepper.admit(one)
    assert len(sent()) == 2, "the first, and the one that needs none"
    assert stepper.waiting == 4
    dropped = asked.pop(2)
    stepper.drop(dropped)
    seen: set[int] = set()
    while stepper.busy:
        assert not stepper.step().failed
        assert len(engine().loras) <= 1, "what is in memory fits"
        seen |= {*engine().loras}
    assert [one.text for one in asked] == ["abc"] * 5
    assert not dropped.token_ids
    assert len(seen) == 3, "the first was loaded again"
    assert (stepper.live, stepper.waiting) == (0, 0)


def test_a_failed_step_leaves_no_adapter_held(made: Made) -> None:
    stepper = made()
    for name in ("one", "two"):
        stepper.admit(ask(name))
    engine().fails = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        stepper.step()
    assert not stepper.busy
    again = [ask("two"), ask("one")]
    run_batch(stepper, again)
    assert [one.text for one in again] == ["abc", "abc"]


def _of_another_model(folder: Path) -> None:
    save_adapter(folder, make_model("llama", hidden_size=64), targets=("q_proj",))


def _of_no_numbers(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    # Every number of it is NaN.
    content = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = b"\xff" * (len(content) - start)
    weights.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_of_another_model, "is it of this model"),
        (_of_no_numbers, "are no numbers"),
        (lambda folder: save_adapter(folder, make_model("llama"), targets=("v_proj",), rank=400),
         "has the rank 400, and the model was loaded for ranks up to 320"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter"),
        (lambda folder: None, "is refused by vLLM: unheard of"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_used_is_refused_before_vllm_has_its_request(
    made: Made, folder: Path, change: Callable[[Path], None], words: str
) -> None:
    stepper = made()
    change(folder / "adapters" / "one")
    engine().refuses = "/one"
    with pytest.raises(RequestError, match=words) as caught:
        stepper.admit(ask("one"))
    assert caught.value.code in ("adapter_not_found", "adapter_unusable")
    assert not engine().requests
    fine = ask("two")
    run_batch(stepper, [fine])
    assert fine.text == "abc"


def test_one_that_comes_to_a_model_without_any_waits_for_the_next_load(
    made: Made, folder: Path
) -> None:
    later = folder / "later"
    later.mkdir()
    for adapter in list((folder / "adapters").iterdir()):
        adapter.rename(later / adapter.name)
    stepper = made()
    (later / "one").rename(folder / "adapters" / "one")
    with pytest.raises(RequestError, match="load the model again") as caught:
        stepper.admit(ask("one"))
    assert caught.value.code == "adapter_unusable"


def test_a_request_that_vllm_refuses_holds_no_adapter(made: Made) -> None:
    stepper = made()
    with pytest.raises(RequestError, match="unlucky"):
        stepper.admit(generation([97], 3, adapter="one", temperature=1.0, seed=13))
    fine = ask("two")
    run_batch(stepper, [fine])
    assert fine.text == "abc"
