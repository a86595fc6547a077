"""A vLLM of which only the part is here that llmserve uses, and whose answers are scripted.

``test_interface.py`` compares its names and arguments with the installed vLLM's. An answer repeats
its prompt, byte by byte, so that tests know what comes next; a byte that ends answers is the same
for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONTEXT, VOCABULARY = 64, 256


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass(kw_only=True)
class StructuredOutputsParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None


@dataclass(kw_only=True)
class SamplingParams:
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    _bad_words_token_ids: list[list[int]] | None = None


class StatLoggerBase:
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        raise NotImplementedError

    def log_engine_initialized(self) -> None:
        raise NotImplementedError


def tokens_input(prompt_token_ids: list[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": prompt_token_ids}


class EngineArgs:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def create_engine_config(self) -> Any:
        model = SimpleNamespace(
            max_model_len=self.arguments.get("max_model_len", CONTEXT),
            dtype="torch.float32",
            hf_text_config=SimpleNamespace(eos_token_id=0),
            get_vocab_size=lambda: VOCABULARY,
            try_get_generation_config=lambda: {"eos_token_id": [0]},
            get_num_kv_heads=lambda _: 2,
            get_head_size=lambda: 8,
            get_num_layers=lambda _: 3,
        )
        return SimpleNamespace(
            arguments=self.arguments,
            model_config=model,
            parallel_config=SimpleNamespace(),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            cache_config=SimpleNamespace(
                block_size=16, num_gpu_blocks=10, kv_cache_memory_bytes=None
            ),
        )


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Any]] | None
    finish_reason: str | None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Any] | None] | None
    num_cached_tokens: int | None
    finished: bool


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass
class _Request:
    prompt: list[int]
    params: SamplingParams
    lora: LoRARequest | None
    priority: int
    seen: list[Any]
    given: int = 0


class Renderer:
    """Makes four tokens of the mark of an image, and refuses what it has no image for."""

    MARK = 3

    def render_cmpl(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._rendered(**prompt) for prompt in prompts]

    def _rendered(
        self, prompt_token_ids: list[int], multi_modal_data: dict[str, list[Any]]
    ) -> dict[str, Any]:
        images = multi_modal_data["image"]
        if len(images) > prompt_token_ids.count(self.MARK):
            raise ValueError("no place for an image\nand more")
        ids = [each for one in prompt_token_ids for each in [one] * (4 if one == self.MARK else 1)]
        return {"type": "multimodal", "prompt_token_ids": ids, "mm_kwargs": {"image": images}}


class LLMEngine:
    """Runs at most two requests at once, so that others wait.

    ``empty_steps`` is how many of the next steps have no answer for anybody.
    """

    made: list[LLMEngine] = []

    def __init__(self, config: Any, stat_loggers: list[Any]) -> None:
        self.vllm_config = config
        self.requests: dict[str, _Request] = {}
        self.aborted: list[str] = []
        self.fails: Exception | None = None
        self.empty_steps = 0
        self.loras: dict[int, LoRARequest] = {}
        self.refuses = ""
        """The end of the path of an adapter that it refuses, as it does some."""
        self.ends_with: str | None = None
        self.ended = False
        self.engine_core = SimpleNamespace(shutdown=self._shutdown)
        self.renderer = Renderer()
        self._loggers = [make(config, 0) for make in stat_loggers]
        self.made.append(self)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, stat_loggers: list[Any]) -> LLMEngine:
        return cls(vllm_config, stat_loggers)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        if self.refuses and lora_request.lora_path.endswith(self.refuses):
            raise ValueError("unheard of\nand more")
        self.loras[lora_request.lora_int_id] = lora_request
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.loras.pop(lora_id, None) is not None

    def add_request(
        self,
        request_id: str,
        prompt: Mapping[str, Any],
        params: Any,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        if params.seed == 13:
            raise ValueError("unlucky\nand more")
        prompt_ids = list(prompt["prompt_token_ids"])
        self.requests[request_id] = _Request(
            prompt_ids, params, lora_request, priority, prompt.get("mm_kwargs", {}).get("image", [])
        )  # fmt: skip
        return f"{request_id}-internal"

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for name in request_ids:
            self.requests.pop(name, None)

    def step(self) -> list[RequestOutput]:
        if self.fails:
            raise self.fails
        if self.empty_steps:
            self.empty_steps -= 1
            return []
        # The lower number goes first, as with vLLM's scheduling_policy "priority".
        running = sorted(self.requests.items(), key=lambda item: item[1].priority)[:2]
        outputs = [self._next(name, request) for name, request in running]
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        stats = SimpleNamespace(
            num_waiting_reqs=max(0, len(self.requests) - 2),
            num_skipped_waiting_reqs=0,
            kv_cache_usage=0.1 * len(running),
            spec_decoding_stats=SimpleNamespace(num_draft_tokens=2, num_accepted_tokens=1),
        )
        for logger in self._loggers:
            logger.record(stats, None, mm_cache_stats=None, engine_idx=0)
        return outputs

    def _next(self, name: str, request: _Request) -> RequestOutput:
        params, first = request.params, not request.given
        token = request.prompt[request.given % len(request.prompt)]
        request.given += 1
        reason = self.ends_with
        if token in params.stop_token_ids and request.given > params.min_tokens:
            reason = "stop"
        elif request.given == params.max_tokens:
            reason = "length"
        named = params.logprob_token_ids
        wants = params.logprobs is not None or named is not None
        scores = _named(token, named) if named else _ranked(token)
        answer = CompletionOutput([token], [scores] if wants else None, reason)
        prompt = None
        if first and params.prompt_logprobs is not None:
            prompt = [None, *(_ranked(token) for token in request.prompt[1:])]
        return RequestOutput(name, [answer], prompt, 5, reason is not None)

    def _shutdown(self) -> None:
        self.ended = True


def _ranked(token: int) -> dict[int, Any]:
    """Return log-probabilities as vLLM has them: the chosen token first, whatever its rank."""
    others = {90: -0.5, 91: -0.25, token: -3.0}
    return {one: SimpleNamespace(logprob=others[one]) for one in (token, 90, 91)}


def _named(token: int, named: list[int]) -> dict[int, Any]:
    """Return those of the chosen token and of the named ones, which vLLM sends alone."""
    return {one: SimpleNamespace(logprob=-float(one)) for one in (token, *named)}


_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"SamplingParams": SamplingParams, "__version__": "0.32.0"},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
    "vllm.inputs": {"tokens_input": tokens_input},
    "vllm.lora": {},
    "vllm.lora.ops": {},
    "vllm.lora.ops.torch_ops": {},
    "vllm.lora.ops.torch_ops.lora_ops": {"bgmv_shrink": lambda *_: None},
    "vllm.lora.punica_wrapper": {},
    "vllm.lora.punica_wrapper.punica_cpu": {"bgmv_shrink": lambda *_: None},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu", is_cpu=lambda: True)},
    "vllm.sampling_params": {
        "RequestOutputKind": RequestOutputKind,
        "StructuredOutputsParams": StructuredOutputsParams,
    },
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.llm_engine": {"LLMEngine": LLMEngine},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
    "vllm.distributed": {"cleanup_dist_env_and_memory": lambda: None},
}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LLMEngine]]:
    """Let the plugin's modules import the scripted vLLM, whether there is another or not."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "llmserve_vllm")]:
        monkeypatch.delitem(sys.modules, name)
    for variable in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        # What the plugin sets is restored after the test.
        monkeypatch.setenv(variable, "")
    for name, content in _MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    LLMEngine.made.clear()
    yield LLMEngine
    for name in [name for name in sys.modules if name.split(".")[0] == "llmserve_vllm"]:
        del sys.modules[name]
