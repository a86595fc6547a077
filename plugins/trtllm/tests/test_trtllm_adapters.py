"""Adapters by name under the LLM API: from the build to what TensorRT-LLM gets, by a fake of it.

The fake refuses what NVIDIA's sources refuse, and what they would leave out without a word.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import llmserve
from llmserve.contract.failures import read
from llmserve.errors import IncompatibleError, LLMServeError
from llmserve.plugin import (
    Repository,
    add_adapter,
    check_repository,
    demo_model_path,
    model_adapters,
    remove_adapter,
)
from llmserve.runtime import read_lora
from llmserve.testing import FakeRequest, make_parts
from llmserve.testing.tiny_adapters import save_adapter
from llmserve.testing.tiny_models import make_model
from llmserve_trtllm.runtime.engine_request import EngineLimits
from llmserve_trtllm.runtime.llmapi import LlmApi

MODULES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h", "up_proj": "mlp_gate",
}  # fmt: skip


@dataclass
class LoraConfig:
    """As in tensorrt_llm/lora_helper.py."""

    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None


@dataclass(slots=True)
class LoRARequest:
    """As in tensorrt_llm/executor/request.py."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


class Llm:
    """``tensorrt_llm.LLM``: answers at once, or when ``go`` is set."""

    made: list[Llm]
    go: threading.Event

    def __init__(self, **options: Any) -> None:
        self.lora: LoraConfig | None = options.get("lora_config")
        if self.lora:
            # _torch/pyexecutor/_util.py
            assert self.lora.lora_target_modules, "Expecting at least one lora target module"
            # NVIDIA/TensorRT-LLM#5480: answers with adapters are others with CUDA graphs.
            assert options["cuda_graph_config"] is None
        self.calls: list[LoRARequest | None] = []
        self.read: dict[int, str] = {}
        """The files of each number: load_from_hf in lora_manager.py reads none a second time."""
        self.made.append(self)

    def generate_async(
        self, ids: Any, params: Any, lora_request: LoRARequest | None = None, **_: Any
    ) -> Any:
        if lora_request is not None:
            # executor/base_worker.py, _enqueue_request: without lora_config it is left out.
            assert self.lora, "the adapter would be left out"
            assert self.lora.max_cpu_loras
            lora = read_lora(Path(lora_request.lora_path))
            # cpp/tensorrt_llm/kernels/lora: "Invalid low_rank … must be smaller than mMaxLowRank".
            assert lora.rank <= self.lora.max_lora_rank
            modules = {MODULES[name.rsplit(".", 1)[-1]] for name in lora.shapes}
            # load_from_hf continues with the next module where one is no target.
            assert modules <= {*self.lora.lora_target_modules}, "a product would be left out"
            content = lora.file.read_bytes().hex()
            assert self.read.setdefault(lora_request.lora_int_id, content) == content
        self.calls.append(lora_request)
        return Result(self.go)

    def shutdown(self) -> None:
        pass


class Result:
    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def result(self) -> Any:
        assert self._go.wait(20)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6])])

    def abort(self) -> None:
        pass


@pytest.fixture(autouse=True)
def llms(monkeypatch: pytest.MonkeyPatch) -> list[Llm]:
    Llm.made, Llm.go = [], threading.Event()
    Llm.go.set()
    names = ("", ".llmapi", ".lora_manager", ".executor", ".executor.request")
    modules = {name: ModuleType(f"tensorrt_llm{name}") for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"tensorrt_llm{name}", module)
    vars(modules[""]).update(LLM=Llm, SamplingParams=SimpleNamespace)
    vars(modules[".llmapi"]).update(
        KvCacheConfig=dict,
        SchedulerConfig=dict,
        CapacitySchedulerPolicy=SimpleNamespace(GUARANTEED_NO_EVICT=1),
    )
    vars(modules[".lora_manager"]).update(LoraConfig=LoraConfig)
    vars(modules[".executor.request"]).update(LoRARequest=LoRARequest)
    return Llm.made


def model_folder(folder: Path, family: str = "llama") -> Any:
    """Write a tiny model with the demo's tokenizer, and return it."""
    demo = demo_model_path()
    shutil.copytree(demo, folder, ignore=lambda _, names: [n for n in names if "token" not in n])
    size = json.loads((demo / "config.json").read_text())["vocab_size"]
    model = make_model(family, vocab_size=size)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    model = model_folder(folder / "model")
    for seed, (name, targets) in enumerate(
        {"one": ("q_proj", "v_proj"), "two": ("up_proj",), "wide": ("o_proj",)}.items()
    ):
        rank = 40 if name == "wide" else 4
        save_adapter(folder / name, model, targets=targets, seed=seed, rank=rank)
    return folder


Built = Callable[..., Path]


@pytest.fixture
def built(source: Path, tmp_path: Path) -> Built:
    def build(*names: str, **options: Any) -> Path:
        adapters = ",".join(f"{name}={source / name}" for name in names)
        llmserve.build(
            "trtllm", str(source / "model"), name="mine", output=tmp_path / "models",
            layout="llmapi", adapters=adapters, decoupled=False, **options,
        )  # fmt: skip
        return tmp_path / "models"

    return build


class Served:
    """The part ``tensorrt_llm`` of a model that was built, as Triton loads it."""

    def __init__(self, repository: Path) -> None:
        part = Repository.open(repository).model("mine_tensorrt_llm")
        assert part.manifest is not None
        components = part.manifest.components
        self.limits = EngineLimits(components["generator"]["settings"], part.folder / "1")
        self._api = LlmApi(components["stage"]["settings"], part.folder / "1")
        self._api.start(make_parts(self.limits, inputs=("adapter",), decoupled=False))

    def send(self, *adapters: str, id: str = "", stop: bool = False) -> Any:
        rows = len(adapters)
        inputs: dict[str, Any] = {
            "input_ids": np.array([[1, 2]] * rows, np.int32),
            "input_lengths": np.array([[2]] * rows, np.int32),
            "request_output_len": np.array([[8]] * rows, np.int32),
            # Preprocessing sends it always.
            "adapter": np.array([[each.encode()] for each in adapters], object),
        }
        if stop:
            inputs["stop"] = np.array([[True]])
        request = FakeRequest(inputs, request_id=id)
        self._api.execute([request])
        return request

    def close(self) -> None:
        self._api.finalize()


def failure(request: Any) -> Any:
    (response,) = request.responses
    return read(response.error.message())


def test_requests_reach_the_llm_api_with_the_adapters_that_they_name(
    built: Built, llms: list[Llm]
) -> None:
    repository = built("one", "two")
    home = repository / "mine" / "1" / "adapters"
    assert sorted(path.name for path in home.iterdir()) == ["one", "two"]
    served = Served(repository)
    assert served.limits.adapters == ["one", "two"]
    requests = [served.send(name) for name in ("one", "", "two", "one")]
    requests += [served.send("one", "two", "")]
    served.close()
    for request in requests:
        assert request.closed
        assert request.responses[0].error is None, request.responses[0].error.message()
    (llm,) = llms
    assert llm.lora is not None
    assert sorted(llm.lora.lora_target_modules) == sorted(MODULES.values())
    # The rank is 16 at least, and what one of that takes of a gigabyte decides how many fit.
    assert (llm.lora.max_lora_rank, llm.lora.max_loras) == (16, 8)
    assert llm.lora.max_cpu_loras is not None
    assert llm.lora.max_cpu_loras > 8
    assert len(llm.calls) == 7
    paths = [call and call.lora_path for call in llm.calls]
    assert sorted(map(str, paths)) == sorted(
        [*[str(home / "one")] * 3, *[str(home / "two")] * 2, "None", "None"]
    )
    assert len({call.lora_int_id for call in llm.calls if call}) == 2


def test_a_model_without_adapters_is_loaded_for_none(built: Built, source: Path) -> None:
    repository = built()
    served = Served(repository)
    assert Llm.made[-1].lora is None
    unknown = served.send("one")
    add_adapter(Repository.open(repository).model("mine"), "one", source / "one")
    late = served.send("one")
    plain = served.send("")
    served.close()
    assert (failure(unknown).code, failure(unknown).param) == ("adapter_not_found", "adapter")
    assert "the model has no adapter 'one'" in failure(unknown).words
    assert failure(late).code == "adapter_unusable"
    assert "load the model again" in failure(late).words
    assert plain.responses[0].error is None
    assert Llm.made[-1].calls == [None]


def test_adapters_come_go_and_change_while_the_model_is_served(built: Built, source: Path) -> None:
    repository = built("one")
    model = Repository.open(repository).model("mine")
    served = Served(repository)
    requests = [served.send("one")]
    Served.close(served)
    served = Served(repository)
    add_adapter(model, "two", source / "two")
    assert [*model_adapters(model)] == ["one", "two"]
    assert served.limits.adapters == ["one", "two"]
    assert not check_repository(repository, models=["mine"], served_here=False)
    requests += [served.send("one"), served.send("two")]
    _wait(requests)
    # One that is replaced has another number: TensorRT-LLM reads none a second time.
    add_adapter(model, "one", source / "two")
    requests += [served.send("one")]
    _wait(requests)
    add_adapter(model, "wide", source / "wide")
    wide = served.send("wide")
    remove_adapter(model, "two")
    gone = served.send("two")
    served.close()
    assert all(request.responses[0].error is None for request in requests)
    calls = [call for call in Llm.made[-1].calls if call]
    assert len({call.lora_int_id for call in calls}) == 3
    assert failure(wide).words.endswith(
        "has the rank 40, and the model was loaded for ranks up to 16: load it again"
    )
    assert failure(gone).code == "adapter_not_found"


def _wait(requests: list[Any]) -> None:
    for request in requests:
        for _ in range(2000):
            if request.closed:
                break
            threading.Event().wait(0.01)
        assert request.closed


def test_requests_wait_for_places_in_their_order(built: Built) -> None:
    """A place is for the highest rank: here there is memory for one."""
    served = Served(built("one", "two", adapter_mb=1, max_lora_rank=512))
    llm = Llm.made[-1]
    assert llm.lora is not None
    assert (llm.lora.max_lora_rank, llm.lora.max_loras, llm.lora.max_cpu_loras) == (512, 1, 1)
    Llm.go.clear()
    names = ("one", "two", "one", "")
    requests = [served.send(name) for name in names[:1]]
    while not llm.calls:
        threading.Event().wait(0.01)
    requests += [served.send(name) for name in names[1:]]
    both = served.send("one", "two")
    while len(llm.calls) < 2:
        threading.Event().wait(0.01)
    # One is in its place, and what needs none does not wait.
    assert llm.calls[1] is None
    assert not any(request.closed for request in requests)
    Llm.go.set()
    served.close()
    assert all(request.responses[0].error is None for request in requests)
    used = [Path(call.lora_path).name for call in llm.calls if call]
    assert sorted(used) == ["one", "one", "two"]
    assert failure(both).code == "conflicting_options"
    assert "names 2 adapters, more than there is memory for" in failure(both).words


def test_who_has_left_while_it_waited_for_an_adapter_has_nothing_generated(built: Built) -> None:
    served = Served(built("one", "two", adapter_mb=1, max_lora_rank=512))
    llm = Llm.made[-1]
    Llm.go.clear()
    requests = [served.send("one", id="a")]
    while not llm.calls:
        threading.Event().wait(0.01)
    requests += [served.send("two", id="b"), served.send("two", id="c")]
    requests[1].cancelled = True
    stopping = served.send("two", id="c", stop=True)
    assert stopping.closed
    Llm.go.set()
    served.close()
    assert all(request.closed for request in requests)
    assert [Path(call.lora_path).name for call in llm.calls if call] == ["one"]


def test_what_tensorrt_llm_leaves_out_is_refused(source: Path, tmp_path: Path) -> None:
    """The MLP of a Mistral gets no lora_params (_torch/models/modeling_mistral.py)."""
    model = model_folder(tmp_path / "model", "mistral")
    for name, targets in {"fine": ("q_proj", "o_proj"), "lost": ("up_proj",)}.items():
        save_adapter(tmp_path / name, model, targets=targets)
    options: dict[str, Any] = {"layout": "llmapi", "output": tmp_path / "models", "name": "mine"}
    with pytest.raises(LLMServeError, match=r"adds to model\.layers\.0\.mlp\.up_proj"):
        llmserve.build(
            "trtllm", str(tmp_path / "model"), adapters=f"lost={tmp_path / 'lost'}", **options
        )
    llmserve.build(
        "trtllm", str(tmp_path / "model"), adapters=f"fine={tmp_path / 'fine'}", **options
    )
    Served(tmp_path / "models").close()
    lora = Llm.made[-1].lora
    assert lora is not None
    assert lora.lora_target_modules == ["attn_dense", "attn_k", "attn_q", "attn_v"]


def test_a_model_of_another_type_takes_no_adapter_later(source: Path, tmp_path: Path) -> None:
    llmserve.build("trtllm", "demo", name="mine", output=tmp_path, layout="llmapi")
    with pytest.raises(IncompatibleError, match="may leave out what adapters add to gpt2"):
        add_adapter(Repository.open(tmp_path).model("mine"), "one", source / "one")
