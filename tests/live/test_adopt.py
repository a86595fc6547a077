"""What is adopted answers as the old server did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import openai
import pytest
from tritonclient import grpc as triton_grpc

from llmserve.builder.server_file import ServerFile
from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.command import run
from tests.gguf_files import write_model
from tests.live.gateway import Gateway, gateway_of
from tests.live.servers import Serving

PROMPTS = ("Programming in C++ is like", "Once upon a time", "The capital of France is")
_MODEL = Path(__file__).parent / "tutorials/models/llama_python.py"
_CONFIG = """
backend: "python"
parameters: { key: "model", value: { string_value: "FOLDER" } }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "max_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def ask_as_the_tutorial(triton: LiveTriton, model: str, prompt: str) -> str:
    """Ask as the tutorial's own client does."""
    text = triton_grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    length = triton_grpc.InferInput("max_tokens", [1], "UINT32")
    length.set_data_from_numpy(np.array([24], dtype=np.uint32))
    client = triton_grpc.InferenceServerClient(triton.server.grpc_url)
    return str(client.infer(model, [text, length]).as_numpy("text_output").reshape(-1)[0].decode())


@pytest.mark.long
def test_a_tutorials_pipeline_answers_as_before(triton: LiveTriton, tmp_path: Path) -> None:
    old = tmp_path / "old" / "llama_python"
    (old / "1").mkdir(parents=True)
    config = _CONFIG.replace("FOLDER", str(demo_model_path()))
    (old / "config.pbtxt").write_text(config, encoding="utf-8")
    code = _MODEL.read_text(encoding="utf-8").replace(
        "model=folder, tokenizer", "model=folder, dtype=torch.float32, tokenizer"
    )
    code = code.replace("import transformers\n", "import torch\nimport transformers\n", 1)
    (old / "1/model.py").write_text(code, encoding="utf-8")
    served = triton.repository / "llama_python"
    shutil.copytree(old, served)
    triton.load("llama_python")
    try:
        before = [ask_as_the_tutorial(triton, "llama_python", each) for each in PROMPTS]
    finally:
        triton.unload("llama_python")
        shutil.rmtree(served)
    out = tmp_path / "llmserve.toml"
    done = run("adopt", str(tmp_path / "old"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    (spec,) = ServerFile.read(out).models.values()
    assert spec.plugin == "hf"
    assert dict(spec.options) == {
        "layout": "tutorial", "max_batch_size": 0, "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    # By a name of its own: another test may serve the tutorial's from the same repository.
    name = triton.build(spec.plugin, spec.model, name="adopted_python", **spec.options)
    after = [ask_as_the_tutorial(triton, name, each) for each in PROMPTS]
    assert after == before
    assert all(answer.startswith(prompt) for answer, prompt in zip(after, PROMPTS, strict=True))


@pytest.fixture(scope="module")
def old_server(triton: LiveTriton) -> Iterator[Gateway]:
    triton.build("hf", name="small", dtype="float32")
    with gateway_of(triton) as gateway:
        yield gateway


@pytest.mark.long
def test_a_line_of_vllm_is_built_served_and_compared(old_server: Gateway, tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    out = tmp_path / "llmserve.toml"
    line = f"vllm serve {demo_model_path()} --served-model-name small --dtype float32 --port 0"
    done = run(
        "adopt", line, "--plugin", "hf", "--out", str(out), "--compare", old_server.url,
        "--prompts", str(prompts), "--report", str(report),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((report / "answers-small.json").read_text(encoding="utf-8"))
    assert [pair["verdict"] for pair in answers["pairs"]] == ["equal"] * 3
    page = (report / "report.md").read_text(encoding="utf-8")
    assert "- 3 equal" in page
    speeds = [row.split("|") for row in page.splitlines() if row.startswith(("| old |", "| new |"))]
    assert len(speeds) == 2
    assert all(float(cells[2]) > 0 for cells in speeds), page
    assert "--port 0: it is no port" in page, "what was not taken over"


@pytest.mark.long
def test_a_difference_between_the_two_is_told(old_server: Gateway, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo_model_path(), other)
    _damage(other / "model.safetensors")
    done = run(
        "adopt", f"vllm serve {other} --served-model-name small", "--plugin", "hf",
        "--out", str(tmp_path / "llmserve.toml"), "--compare", old_server.url,
        "--report", str(tmp_path / "report"),
    )  # fmt: skip
    assert done.returncode == 8, done.stdout + done.stderr
    assert "differs" in (tmp_path / "report/report.md").read_text(encoding="utf-8")


def _damage(path: Path) -> None:
    """Change some weights, so that it is another model."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    for name, values in tensors.items():
        if name.endswith("mlp.c_proj.weight"):
            tensors[name] = (values * -1.0).astype(values.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.long
def test_a_model_of_ollamas_store_is_built_and_answers(triton: LiveTriton, tmp_path: Path) -> None:
    blobs = tmp_path / "ollama/models/blobs"
    manifests = tmp_path / "ollama/models/manifests/registry.ollama.ai/library/tiny"
    blobs.mkdir(parents=True)
    manifests.mkdir(parents=True)
    digest = "a" * 64
    write_model(blobs / f"sha256-{digest}")
    size = (blobs / f"sha256-{digest}").stat().st_size
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    content = json.dumps({"layers": [{**layer, "size": size}]})
    (manifests / "latest").write_text(content, encoding="utf-8")
    out = tmp_path / "llmserve.toml"
    done = run("adopt", str(tmp_path / "ollama"), "--plugin", "iterative", "--out", str(out))
    assert done.returncode == 0, done.stderr
    built = run("build", "--config", str(out))
    assert built.returncode == 0, built.stderr
    (spec,) = ServerFile.read(out).models.values()
    name = triton.build(spec.plugin, spec.model, name="tiny", **spec.options)
    assert triton.client.generate(name, PROMPTS[0], max_tokens=4).output_tokens == 4


_SHOUTS = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "PROMPT").as_numpy().reshape(-1)[0]
            answer = np.array([text.decode().upper().encode()], dtype=object)
            responses.append(pb.InferenceResponse([pb.Tensor("ANSWER", answer)]))
        return responses
"""
_SHOUTER = """
backend: "python"
input { name: "PROMPT" data_type: TYPE_STRING dims: [1] }
output { name: "ANSWER" data_type: TYPE_STRING dims: [1] }
instance_group { kind: KIND_CPU }
"""


_ENSEMBLE = """
platform: "ensemble"
input { name: "QUESTION" data_type: TYPE_STRING dims: [1] }
output { name: "REPLY" data_type: TYPE_STRING dims: [1] }
ensemble_scheduling {
  step {
    model_name: "louder" model_version: -1
    input_map { key: "PROMPT" value: "QUESTION" } output_map { key: "ANSWER" value: "loud" }
  }
  step {
    model_name: "louder" model_version: -1
    input_map { key: "PROMPT" value: "loud" } output_map { key: "ANSWER" value: "REPLY" }
  }
}
"""


@pytest.fixture
def shouter(tmp_path: Path) -> Path:
    """A file that declares a hand-written model in three lines."""
    for name in ("shouter", "louder"):
        model = tmp_path / "old" / name
        (model / "1").mkdir(parents=True)
        (model / "1/model.py").write_text(_SHOUTS, encoding="utf-8")
        (model / "config.pbtxt").write_text(_SHOUTER, encoding="utf-8")
    (tmp_path / "old/whole/1").mkdir(parents=True)
    (tmp_path / "old/whole/config.pbtxt").write_text(_ENSEMBLE, encoding="utf-8")
    file = tmp_path / "llmserve.toml"
    file.write_text(
        'repository = "old"\n[models.shouter]\ninput = "PROMPT"\noutput = "ANSWER"\n'
        '[models.whole]\ninput = "QUESTION"\noutput = "REPLY"\n',
        encoding="utf-8",
    )
    return file


@pytest.mark.parametrize("when", ["at the start", "on demand"])
def test_a_hand_written_model_goes_on_and_is_reached_by_three_lines(
    shouter: Path, when: str
) -> None:
    on_demand = ["--on-demand"] if when == "on demand" else []
    with closing(Serving("--config", str(shouter), *on_demand)) as serve:
        url = f"http://{serve.frontend[0]}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert [each.id for each in client.models.list()] == ["shouter", "whole"]
        # What it is made of is loaded with it, and not offered.
        answer = client.completions.create(model="whole", prompt="twice")
        assert answer.choices[0].text == "TWICE"
        answer = client.completions.create(model="shouter", prompt="quiet please")
        assert answer.choices[0].text == "QUIET PLEASE"
        streamed = client.completions.create(model="shouter", prompt="hush", stream=True)
        assert "".join(each.choices[0].text for each in streamed if each.choices) == "HUSH"
        assert serve.client.generate("shouter", "hello").text == "HELLO"
        asked = run("query", "shouter", "hello", "--url", serve.url)
        assert asked.stdout.strip() == "HELLO"
        if on_demand:
            assert run("unload", "shouter", "--url", serve.url).returncode == 0
            listed = [each.id for each in client.models.list()]
            assert listed == ["shouter", "whole"], "it is still offered"
            again = client.completions.create(model="shouter", prompt="again")
            assert again.choices[0].text == "AGAIN"
    config = (shouter.parent / "old/shouter/config.pbtxt").read_text(encoding="utf-8")
    assert config == _SHOUTER
