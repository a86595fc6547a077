"""Images under the LLM API: from a request to what TensorRT-LLM reads, by a fake of its module.

The fake reads a prompt with the processor of transformers, as TensorRT-LLM does, and refuses what
NVIDIA's sources refuse, as of 1.2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import llmserve
from llmserve.contract.failures import read
from llmserve.errors import IncompatibleError
from llmserve.plugin import ModelSource, Repository, check_repository, demo_model_path
from llmserve.runtime import Params, Prompt, RequestError
from llmserve.testing import FakeRequest, make_parts, read_config
from llmserve.testing.tiny_seeing import data_url, picture, save_seeing
from llmserve_trtllm.runtime.engine_request import EngineLimits, RequestWriter
from llmserve_trtllm.runtime.llmapi import LlmApi
from llmserve_trtllm.runtime.prompts import SeeingPrompts
from llmserve_trtllm.seeing import KINDS, reads_images
from llmserve_trtllm.versions import Version

CHAT = "user: <image>what?\nassistant:"
URL = data_url(picture(1))
LIMITS = {"images": 2, "megabytes": 1, "megapixels": 1}
NAMES = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_IMAGE_URL": "image_url",
}


class Llm:
    """``tensorrt_llm.LLM`` with a model of the type llava_next."""

    made: list[Llm]

    def __init__(self, **options: Any) -> None:
        from transformers import AutoProcessor

        self.options = options
        self.processor = AutoProcessor.from_pretrained(options["model"])
        self.read: list[list[int]] = []
        self.images: list[list[Any]] = []
        self.made.append(self)

    def generate_async(self, inputs: Any, params: Any, **_: Any) -> Any:
        from PIL import Image

        # inputs/data.py, prompt_inputs
        if not isinstance(inputs, (str, list, dict)):
            raise TypeError(f"Invalid type of inputs for llm.generate: {type(inputs)}")
        # llmapi/llm.py: without a text, no processor sees the prompt, or one that is decoded.
        assert isinstance(inputs, dict)
        assert "prompt_token_ids" not in inputs
        # inputs/registry.py: a tokenizer is what LLM has unless it is told to skip it.
        assert not self.options["skip_tokenizer_init"]
        # _preprocess in modeling_qwen2vl.py passes these on as keywords: None is none.
        assert "mm_processor_kwargs" not in inputs
        data = inputs.get("multi_modal_data", {})
        images = data.get("image", [])
        for image in images:
            # inputs/multimodal.py, serialize_item
            if not isinstance(image, Image.Image):
                raise ValueError(f"Unsupported object type: {type(image)}")
            # As transformers' smart_resize for Qwen2-VL, which that processor calls.
            if max(image.size) > 200 * min(image.size):
                raise ValueError("absolute aspect ratio must be smaller than 200\nand more")
        # _torch/models/modeling_llava_next.py, LlavaNextInputProcessor.__call__
        if images:
            ids = self.processor(text=inputs["prompt"], images=images, return_tensors="pt")
            ids = ids["input_ids"][0].tolist()
        else:
            ids = self.processor.tokenizer(inputs["prompt"])["input_ids"]
        self.read.append(ids)
        self.images.append(images)
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6])])
        return SimpleNamespace(result=lambda: output, abort=lambda: None)

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def llms(monkeypatch: pytest.MonkeyPatch) -> list[Llm]:
    Llm.made = []
    module, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    vars(module).update(LLM=Llm, SamplingParams=SimpleNamespace)
    vars(api).update(
        KvCacheConfig=dict,
        SchedulerConfig=dict,
        CapacitySchedulerPolicy=SimpleNamespace(GUARANTEED_NO_EVICT=1),
    )
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    return Llm.made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing("llava_next", folder / "model")
    return folder


class Served:
    """What reads a request, and the part ``tensorrt_llm``, which answers it."""

    def __init__(self, folder: Path) -> None:
        seen = {"path": "model", "image_limits": LIMITS}
        self.limits = EngineLimits(
            {
                "max_seq_len": 512, "max_input_len": 511, "max_beam_width": 1, "vocab_size": 200,
                "eos_ids": [2], "pad_id": 0, "seen": seen,
            },
            folder,
        )  # fmt: skip
        settings = {
            **seen, "streams": False, "stand_in": False, "scheduler": "GUARANTEED_NO_EVICT",
            "max_batch_size": 4, "dtype": "auto", "tensor_parallel": 1, "pipeline_parallel": 1,
            "kv_cache": {"enable_block_reuse": False}, "guided_decoding_backend": "",
            "sampler_type": "",
        }  # fmt: skip
        self._parts = make_parts(self.limits, inputs=("image_url",), decoupled=False)
        writer = {"sampling": [], "no_end": -1, "refused": {}}
        self._writer = RequestWriter(writer, self._parts)
        self._api = LlmApi(settings, folder)
        self._api.start(self._parts)

    def send(self, *asked: tuple[str, list[str]]) -> Any:
        """Send conversations and their images as preprocessing does."""
        prompts = []
        for text, urls in asked:
            seen = self.limits.read_images(text, urls)
            params = Params(image_url=tuple(urls))
            prompts.append(Prompt("", [*seen.ids], params, images=seen.images))
        return self.send_written(prompts)

    def send_written(self, prompts: list[Prompt], **changes: Any) -> Any:
        made = self._writer.write(prompts, [8] * len(prompts), None, None)
        inputs = {
            inside: np.array(made[name], object if inside == "image_url" else np.int32)
            for name, inside in NAMES.items()
        }
        request = FakeRequest({**inputs, **changes})
        self._api.execute([request])
        self._api.finalize()
        return request


def failure(request: Any) -> Any:
    (response,) = request.responses
    return read(response.error.message())


def test_tensorrt_llm_reads_the_tokens_that_were_counted_and_the_images(
    folder: Path, llms: list[Llm]
) -> None:
    served = Served(folder)
    two = (CHAT.replace("?", "<image>?"), [URL, data_url(picture(2, 16, 40))])
    request = served.send((CHAT, [URL]), two)
    assert request.closed
    assert request.responses[0].error is None, request.responses[0].error.message()
    (llm,) = llms
    counted = [[*served.limits.read_images(*each).ids] for each in ((CHAT, [URL]), two)]
    assert llm.read == counted
    assert len(counted[0]) > len(CHAT) - len("<image>") + 1
    assert [[image.tobytes() for image in images] for images in llm.images] == [
        [picture(1).tobytes()],
        [picture(1).tobytes(), picture(2, 16, 40).tobytes()],
    ]
    about = served.limits.about_images()
    assert about is not None
    assert about == {**LIMITS, "tokens": about["tokens"]}
    assert about["tokens"] > 1


def test_a_prompt_without_images_is_a_text_of_the_same_tokens(
    folder: Path, llms: list[Llm]
) -> None:
    """Qwen's processors make positions also of a prompt without images."""
    ids = llms_tokens(folder, "user: what?\nassistant:")
    request = Served(folder).send_written([Prompt("", ids, Params())])
    assert request.responses[0].error is None, request.responses[0].error.message()
    assert (llms[0].read, llms[0].images) == ([ids], [[]])


def llms_tokens(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder / "model")(text)["input_ids"]
    return ids


@pytest.mark.parametrize("template_has_it", [True, False])
def test_a_prompt_begins_with_one_bos_where_the_tokenizer_adds_one(
    folder: Path, tmp_path: Path, template_has_it: bool
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (folder / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    ids = llms_tokens(tmp_path, "what?")
    assert ids[0] == 1
    prompts = SeeingPrompts({"path": "model", "image_limits": LIMITS}, tmp_path)
    prompt = prompts.prompt(ids if template_has_it else ids[1:], [])
    assert llms_tokens(tmp_path, prompt["prompt"]) == ids


def test_tokens_that_no_text_has_are_refused() -> None:
    demo = demo_model_path()
    prompts = SeeingPrompts({"path": demo.name}, demo.parent)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    letters = tokenizer.convert_tokens_to_ids([*"the"])
    assert tokenizer("the")["input_ids"] != letters
    with pytest.raises(RequestError, match="no text has exactly these tokens") as refused:
        prompts.prompt(letters, [])
    assert (refused.value.code, refused.value.param) == ("invalid_value", "input_ids")


@pytest.mark.parametrize(
    ("url", "text", "expected"),
    [
        ("https://example.com/a.png", CHAT, "image 1 is an address, and none is opened"),
        ("data:image/png;base64,AAAA", CHAT, "image 1 "),
        (URL, "user: what?", "the prompt has 0 times <image>"),
        (URL, CHAT + CHAT, "the prompt has 2 times <image>"),
        ("", CHAT, "the prompt has 1 times <image>"),
        (data_url(picture(1, 300, 1)), CHAT, "TensorRT-LLM refuses these images: absolute aspect "
         "ratio must be smaller than 200"),
    ],
)  # fmt: skip
def test_the_engines_model_refuses_images_itself(
    folder: Path, llms: list[Llm], url: str, text: str, expected: str
) -> None:
    """Whoever reaches Triton reaches it as well."""
    marks = llms_tokens(folder, text)
    params = Params(image_url=(url,))
    request = Served(folder).send_written([Prompt("", marks, params, images=marks)])
    assert expected in failure(request).words
    assert failure(request).code in ("invalid_value", "image_not_read")
    assert not llms[0].read


def test_bad_words_of_several_tokens_are_refused_by_name(folder: Path, llms: list[Llm]) -> None:
    """LLM has a tokenizer, and would take them from texts, which are unknown here."""
    words = np.array([[[3, 4], [2, -1]]], np.int32)
    prompt = Prompt("", llms_tokens(folder, "what?"), Params())
    request = Served(folder).send_written([prompt], bad_words_list=words)
    assert failure(request).param == "bad_words"
    assert not llms[0].read


def test_a_build_has_its_processor_and_wires_images_to_the_llm_api(
    folder: Path, tmp_path: Path
) -> None:
    llmserve.build(
        "trtllm", str(folder / "model"), name="seeing", output=tmp_path, layout="llmapi",
        max_images=2, decoupled=False, bls=True,
    )  # fmt: skip
    assert check_repository(tmp_path, models=["seeing"], served_here=False) == []
    repository = Repository.open(tmp_path)
    configs = {model.name: read_config(model.folder) for model in repository}
    inputs = {
        name: [each.name for each in config.input if each.name.lower() == "image_url"]
        for name, config in configs.items()
    }
    assert inputs == {
        "seeing": ["image_url"], "seeing_preprocessing": ["IMAGE_URL"],
        "seeing_tensorrt_llm": ["image_url"], "seeing_postprocessing": [],
        "seeing_tensorrt_llm_bls": ["image_url"],
    }  # fmt: skip
    first, engine, _ = configs["seeing"].ensemble_scheduling.step
    assert first.input_map["IMAGE_URL"] == "image_url"
    assert engine.input_map["image_url"] == first.output_map["OUT_IMAGE_URL"]
    part = repository.model("seeing_tensorrt_llm").manifest
    assert part is not None
    settings = part.components["stage"]["settings"]
    assert settings["image_limits"]["images"] == 2
    assert settings["kv_cache"]["enable_block_reuse"] is False
    for name in ("seeing_preprocessing", "seeing_tensorrt_llm_bls"):
        reads = repository.model(name)
        assert reads.manifest is not None
        assert "image_url" in reads.manifest.contract["inputs"]
        limits = EngineLimits(
            reads.manifest.components["generator"]["settings"], reads.folder / "1"
        )
        assert len(limits.read_images(CHAT, [URL]).ids) > len(CHAT)
    assert "pillow==" not in (tmp_path / "Dockerfile").read_text(encoding="utf-8"), (
        "the image has it"
    )


def context(folder: Path, kind: str, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "processor_config.json").write_text("{}")
    defaults = {"max_images": 8, "stand_in": False, "enable_kv_cache_reuse": ""}
    return SimpleNamespace(source=ModelSource("mine", folder), options={**defaults, **options})


@pytest.mark.parametrize(
    ("version", "kind", "options", "expected"),
    [
        ("1.1.0", "llava_next", {}, r"for TensorRT-LLM 1\.2\.0 or later, and this build is for"),
        ("1.2.1", "idefics3", {}, "not known to read them with models of the type idefics3"),
        ("1.2.1", "llava_next", {"stand_in": True}, "the stand-in .* reads no images"),
        ("1.2.1", "qwen2_vl", {"enable_kv_cache_reuse": True}, "answers about another image"),
    ],
)  # fmt: skip
def test_what_would_not_read_its_images_is_refused_with_who_does(
    tmp_path: Path, version: str, kind: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(IncompatibleError, match=expected) as refused:
        reads_images(context(tmp_path / "m", kind, **options), Version.parse(version))
    assert "hf" in (refused.value.hint or "") or "leave it out" in (refused.value.hint or "")


def test_which_models_read_images(tmp_path: Path) -> None:
    version = Version.parse("1.2.1")
    assert all(reads_images(context(tmp_path / "m", kind), version) for kind in KINDS)
    assert not reads_images(context(tmp_path / "m", "llama"), version)
    assert not reads_images(context(tmp_path / "m", "gemma3", max_images=0), version)
