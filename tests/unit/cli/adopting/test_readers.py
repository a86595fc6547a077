"""What other servers were started with becomes ``llmserve.toml``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmserve.builder.server_file import ServerFile
from llmserve.errors import ConfigError, LLMServeError, OutputError, UsageError
from llmserve_cli.group import cli
from tests.unit.cli.adopting.command_lines import LINES, Line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adopt(*words: str) -> Result:
    result = CliRunner().invoke(cli, ["adopt", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def file_of(*words: str) -> ServerFile:
    adopt(*words)
    return ServerFile.read(Path("llmserve.toml"))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.cited)
def test_a_line_of_the_world_becomes_a_file(line: Line) -> None:
    Path(line.file).write_text(line.text, encoding="utf-8")
    result = adopt(line.file, "--plugin", "vllm")
    text = Path("llmserve.toml").read_text(encoding="utf-8")
    file = ServerFile.read(Path("llmserve.toml"))
    assert [*file.models] == [line.name]
    spec = file.models[line.name]
    expected = line.source
    if expected.startswith("."):
        expected = str(Path(expected).absolute())
        assert f'source = "{line.source}"' in text, "from where the file is"
    assert spec.model == expected
    assert dict(spec.options) == line.options
    assert file.gateway["port"] == line.port
    for words in line.says:
        assert words in result.stderr + text, words
    for secret in line.secrets:
        assert secret not in result.output + text


def test_each_value_says_its_line() -> None:
    Path("start.sh").write_text("#!/bin/sh\nvllm serve a/b \\\n  --max-model-len 512\n", "utf-8")
    adopt("start.sh", "--plugin", "vllm")
    text = Path("llmserve.toml").read_text(encoding="utf-8")
    assert 'source = "a/b"  # start.sh:2: MODEL a/b' in text
    assert "max_model_len = 512  # start.sh:3: --max-model-len 512" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--", "vllm", "serve", "a/b", "--port", "8123", "--max-model-len", "64"],
        ["vllm serve a/b --port 8123 --max-model-len 64"],
        ["vllm", "serve", "a/b", "--port", "8123", "--max-model-len", "64"],
        ["nohup env A=1 python3 -m vllm.entrypoints.openai.api_server --model a/b --port=8123 &"],
    ],
)
def test_a_command_line_is_taken_as_it_is(words: list[str]) -> None:
    file = file_of(*words)
    assert file.models["b"].model == "a/b"
    assert file.gateway["port"] == 8123


def test_what_the_plugin_does_not_have_is_told_with_the_one_that_does() -> None:
    result = adopt("--plugin", "iterative", "vllm serve a/b --max-model-len 64 --swap-space 4")
    assert "iterative has no max_model_len" in result.stderr
    assert "--plugin vllm has it" in result.stderr
    assert "--swap-space 4" in result.stderr
    assert not ServerFile.read(Path("llmserve.toml")).models["b"].options


def test_arguments_of_the_engine_without_an_option_go_together() -> None:
    words = "vllm serve a/b --block-size 16 --seed 3 --disable-sliding-window"
    options = file_of("--plugin", "vllm", words).models["b"].options
    expected = {"block_size": 16, "seed": 3, "disable_sliding_window": True}
    assert json.loads(str(options["engine_args"])) == expected


def test_parts_of_a_value_come_together_and_a_switch_may_be_turned_off() -> None:
    words = (
        "vllm serve a/b -cc.mode=3 --compilation-config.pass-config.fuse-norm true -O2 "
        "--no-async-scheduling --cudagraph-capture-sizes 1 2 4 --no-enable-log-outputs"
    )
    options = file_of("--plugin", "vllm", words).models["b"].options
    assert json.loads(str(options["engine_args"])) == {
        "compilation_config": {"mode": 3, "pass_config": {"fuse_norm": True}},
        "optimization_level": 2, "async_scheduling": False, "cudagraph_capture_sizes": [1, 2, 4],
    }  # fmt: skip


def test_a_part_of_an_option_that_is_no_argument_of_the_engine_is_told() -> None:
    result = adopt("--plugin", "vllm", "vllm serve a/b --speculative-config.method ngram")
    assert "give the whole one as JSON" in result.stderr


def test_a_token_of_the_hub_is_told_as_the_variable_that_a_build_reads() -> None:
    result = adopt("--plugin", "vllm", "vllm serve a/b --hf-token $TOKEN")
    assert "a build reads HF_TOKEN" in result.stderr


def test_an_unknown_option_is_told_and_not_dropped() -> None:
    result = adopt("vllm serve a/b --teleport far --quieter")
    assert "--teleport far: no option of vLLM that is known here" in result.stderr
    assert "--quieter" in result.stderr


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--api-key s3cretvalue0123", "s3cretvalue0123"),
        ("--hf-token hf_abcdefgh12345", "hf_abcdefgh12345"),
        ('--hf-overrides \'{"api_key": "topsecretvalue"}\'', "topsecretvalue"),
        ("--otlp-traces-endpoint http://me:password1@host:4317", "password1"),
        ("--some-secret mysecretvalue", "mysecretvalue"),
        ("--allowed-origins https://u:hiddenword@host", "hiddenword"),
    ],
)
def test_a_secret_is_said_without_its_value(words: str, value: str) -> None:
    result = adopt("--plugin", "vllm", f"vllm serve a/b {words}")
    assert value not in result.output + Path("llmserve.toml").read_text(encoding="utf-8")
    assert words.split()[0] in result.stderr
    ServerFile.read(Path("llmserve.toml"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "vllm serve https://me:hiddenword1@host/model\n"),
        ("b.sh", "vllm serve --model https://me:hiddenword1@host/model\n"),
        ("c.sh", "DATABASE=postgres-hiddenword1 vllm serve a/b\n"),
        ("d.sh", "docker run -e EXTRA=hiddenword1 vllm/vllm-openai --model a/b\n"),
        ("Modelfile", "FROM https://me:hiddenword1@host/model\n"),
        ("e.sh", "vllm serve a/b --lora-modules x=https://me:hiddenword1@host/x\n"),
        ("f.sh", "vllm serve a/b --served-model-name https://me:hiddenword1@host/x\n"),
        ("g.sh", "llama-server -m https://me:hiddenword1@host/x.gguf\n"),
    ],
)
def test_a_secret_in_an_unlikely_place_is_not_written(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    result = adopt(name, "--plugin", "vllm")
    assert "hiddenword1" not in result.output
    assert "hiddenword1" not in Path("llmserve.toml").read_text(encoding="utf-8")


def test_a_key_is_taken_over_by_the_variable_that_has_it() -> None:
    result = adopt("vllm serve a/b --api-key ${MY_KEY} --host 0.0.0.0")
    file = ServerFile.read(Path("llmserve.toml"))
    assert "llmserve key new clients --from-env MY_KEY --file llmserve-keys.json" in result.stderr
    assert file.serve["host"] == "0.0.0.0"
    assert file.gateway["keys"] == str(Path("llmserve-keys.json").absolute())


def test_a_server_that_was_open_without_a_key_is_closed() -> None:
    result = adopt("vllm serve a/b --host 0.0.0.0")
    assert "it was open without a key" in result.stderr
    assert "host" not in ServerFile.read(Path("llmserve.toml")).serve


def test_several_services_share_one_gateway() -> None:
    service = "  {}:\n    image: vllm/vllm-openai\n    command: --model a/{} --port {}\n"
    text = "services:\n" + service.format("x", "x", 8001) + service.format("y", "y", 8005)
    text += "  cache:\n    image: redis\n"
    Path("compose.yaml").write_text(text, encoding="utf-8")
    result = adopt("compose.yaml")
    file = ServerFile.read(Path("llmserve.toml"))
    assert [*file.models] == ["x", "y"]
    assert file.gateway["port"] == 8001
    assert file.serve["grpc_port"] == 0, "Triton's own would be in the way"
    assert "all models have one port: it is 8001" in result.stderr
    assert "service cache" in Path("llmserve.toml").read_text(encoding="utf-8")


def test_two_servers_of_one_script_are_two_models() -> None:
    # haskoe/beancount-ledger, start-llm.sh
    Path("start-llm.sh").write_text(
        "llama-server \\\n  -m ~/models/Qwen3VL-8B-Instruct-Q8_0.gguf \\\n"
        "  --mmproj ~/models/mmproj.gguf --gpu-layers 99 --host 0.0.0.0 --port 8080\n\n"
        "llama-server \\\n  -m ~/models/gemma-2-2b-it-q8_0.gguf --port 8081 --no-mmap\n",
        encoding="utf-8",
    )
    result = adopt("start-llm.sh", "--plugin", "vllm")
    file = ServerFile.read(Path("llmserve.toml"))
    assert [*file.models] == ["Qwen3VL-8B-Instruct-Q8_0", "gemma-2-2b-it-q8_0"]
    assert "only text is served" in result.stderr


@pytest.mark.parametrize(
    ("line", "port", "told"),
    [
        ("llama-server -m a.gguf", 8080, True),
        ("llama-server -m a.gguf --port 8080", 8080, False),
        ("docker run -p 9000:9931 ghcr.io/ggml-org/llama.cpp:server -m a.gguf", 9000, False),
    ],
)
def test_a_port_that_depends_on_the_release_is_told(line: str, port: int, told: bool) -> None:
    Path("start.sh").write_text(f"{line}\n", encoding="utf-8")
    result = adopt("start.sh", "--plugin", "vllm")
    assert ServerFile.read(Path("llmserve.toml")).gateway["port"] == port
    assert ("its newest sources say 9931" in result.stdout + result.stderr) == told


def test_files_of_variables_are_followed_and_their_secrets_are_not_written() -> None:
    Path(".env").write_text(
        "# of the machine\nMODEL=a/b\nexport PORT='8123'  # ours\nHF_TOKEN=hf_hiddenword1\n"
        "VLLM_API_KEY=hiddenword1\nEMPTY=\nDATABASE=postgres://u:hiddenword1@db\n",
        encoding="utf-8",
    )
    Path("more.env").write_text("VLLM_API_KEY=hiddenword1\nTZ=Asia/Seoul\nnonsense\n", "utf-8")
    Path("compose.yaml").write_text(
        "services:\n  vllm:\n    image: vllm/vllm-openai\n    env_file:\n      - more.env\n"
        "      - path: gone.env\n        required: false\n"
        "    environment:\n      - HF_TOKEN=${HF_TOKEN}\n      - OTHER=$DATABASE\n"
        "    command: --model ${MODEL} --max-model-len ${EMPTY:-64}\n"
        "    ports: ['${PORT}:8000']\n",
        encoding="utf-8",
    )
    result = adopt("compose.yaml", "--plugin", "vllm")
    text = Path("llmserve.toml").read_text(encoding="utf-8")
    file = ServerFile.read(Path("llmserve.toml"))
    assert (file.models["b"].model, file.gateway["port"]) == ("a/b", 8123)
    assert dict(file.models["b"].options) == {"max_model_len": 64}
    assert "--from-env VLLM_API_KEY" in result.stderr
    assert "a build reads HF_TOKEN" in result.stderr
    assert "gone.env: it cannot be read here" in result.stderr
    assert "hiddenword1" not in result.output + result.stderr + text


def test_variables_of_docker_run_come_out_of_a_file() -> None:
    Path("docker.env").write_text("MODEL_ID=a/b\nMAX_TOTAL_TOKENS=64\n", encoding="utf-8")
    image = "ghcr.io/huggingface/text-generation-inference"
    file = file_of("--plugin", "vllm", f"docker run --env-file docker.env -p 1234:80 {image}")
    assert file.models["b"].model == "a/b"
    assert dict(file.models["b"].options) == {"max_model_len": 64}


def test_values_of_another_chart_are_refused_with_the_way() -> None:
    Path("values.yaml").write_text(
        "image:\n  repository: vllm/vllm-openai\n  tag: v0.9\nmodel:\n  name: a/b\n", "utf-8"
    )
    with pytest.raises(ConfigError, match="values of a Helm chart") as error:
        adopt("values.yaml")
    assert "helm template" in str(error.value.hint)


def test_nothing_is_run_and_a_command_in_a_value_is_told() -> None:
    result = adopt("vllm serve a/b --max-model-len $(touch ran; echo 5) --dtype `touch ran`")
    assert not Path("ran").exists()
    assert "a shell computes it, and none was run" in result.stderr


def test_a_file_that_is_there_is_not_replaced() -> None:
    adopt("vllm serve a/b")
    before = Path("llmserve.toml").read_text(encoding="utf-8")
    with pytest.raises(OutputError, match="--dry-run"):
        adopt("vllm serve c/d")
    shown = adopt("--dry-run", "vllm serve c/d").stdout
    assert '-source = "a/b"' in shown
    assert '+source = "c/d"' in shown
    assert Path("llmserve.toml").read_text(encoding="utf-8") == before
    adopt("--force", "vllm serve c/d")
    assert '"c/d"' in Path("llmserve.toml").read_text(encoding="utf-8")


def test_another_source_takes_the_place_of_the_old_one() -> None:
    file = file_of("--model", "demo", "vllm serve /mnt/gone --served-model-name small")
    assert file.models["small"].model == "demo"
    Path("two.sh").write_text("vllm serve a/b\nvllm serve c/d\n", encoding="utf-8")
    with pytest.raises(UsageError, match="there are 2"):
        adopt("two.sh", "--model", "demo", "--force")


def test_adapters_are_taken_over() -> None:
    modules = 'sql=./sql \'{"name": "fr", "path": "/a/fr"}\''
    file = file_of("--plugin", "vllm", f"vllm serve a/b --lora-modules {modules} --max-loras 2")
    here = Path.cwd()
    assert file.models["b"].options["adapters"] == f"sql={here}/sql,fr=/a/fr"
    assert file.models["b"].options["max_loras"] == 2


def test_a_graph_of_openvino_model_server_is_read() -> None:
    # openvinotoolkit/model_server, demos/continuous_batching
    Path("model").mkdir()
    Path("model/graph.pbtxt").write_text(
        'node: {\n  calculator: "HttpLLMCalculator"\n  node_options: {\n'
        "      [type.googleapis.com / mediapipe.LLMCalculatorOptions]: {\n"
        '          models_path: "./",\n'
        '          plugin_config: \'{"KV_CACHE_PRECISION": "u8"}\',\n'
        "          enable_prefix_caching: false\n          cache_size: 10\n      }\n  }\n}\n",
        encoding="utf-8",
    )
    config = {"model_config_list": [{"config": {"name": "old", "base_path": "/models/old"}}],
              "mediapipe_config_list": [{"name": "Llama", "base_path": "model"}]}  # fmt: skip
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    result = adopt("config.json", "--plugin", "openvino")
    file = ServerFile.read(Path("llmserve.toml"))
    assert file.models["Llama"].model == str(Path("model").absolute())
    assert dict(file.models["Llama"].options) == {"cache_gb": 10}
    assert "KV_CACHE_PRECISION" in result.stderr
    assert "old" in result.stderr


def test_ollamas_store_is_read_by_its_digests() -> None:
    blobs, manifests = Path("store/blobs"), Path("store/manifests/registry.ollama.ai/library/tiny")
    blobs.mkdir(parents=True)
    manifests.mkdir(parents=True)

    def layer(kind: str, content: bytes, number: int) -> dict[str, object]:
        digest = f"{number:064x}"
        (blobs / f"sha256-{digest}").write_bytes(content)
        media = f"application/vnd.ollama.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    params = json.dumps({"num_ctx": 64, "stop": ["<end>"], "num_predict": 8}).encode()
    layers = [layer("model", b"GGUF", 1), layer("params", params, 2), layer("template", b"t", 3)]
    (manifests / "latest").write_text(json.dumps({"layers": layers}), encoding="utf-8")
    (manifests / "0.6b").write_text(json.dumps({"layers": layers[1:]}), encoding="utf-8")
    away = [{**layers[0], "digest": "sha256:../../../../etc/passwd"}]
    (manifests / "evil").write_text(json.dumps({"layers": away}), encoding="utf-8")
    result = adopt("store", "--plugin", "vllm")
    file = ServerFile.read(Path("llmserve.toml"))
    assert [*file.models] == ["tiny"]
    assert file.models["tiny"].model == str((blobs / f"sha256-{1:064x}").absolute())
    assert dict(file.models["tiny"].options) == {"max_model_len": 64, "max_tokens": 8}
    assert "stop of each request" in result.stderr
    assert "names no model" in result.stderr
    assert "a layer without a digest" in result.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "services: [" * 3000),
        ("b.yaml", "a: &a [*a]\nb: : :"),
        ("c.json", '{"model_config_list": '),
        ("d.txt", "nothing of it starts a server"),
        ("e.yaml", "services:\n  x:\n    image: redis\n    build: ."),
        ("f.yaml", "{{ helm }}"),
        ("g.sh", "vllm serve 'open\n" + "x\n" * 500),
        ("Modelfile", "FROM"),
    ],
)
def test_a_damaged_file_ends_in_a_clear_line(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    result = CliRunner().invoke(cli, ["adopt", name], standalone_mode=False)
    if result.exception is not None:
        assert isinstance(result.exception, LLMServeError)
        assert "\n" not in str(result.exception)


def test_a_file_too_large_or_of_bytes_is_refused() -> None:
    Path("large.yaml").write_text("#" * (1 << 19), encoding="utf-8")
    with pytest.raises(ConfigError, match="is over 256 KB"):
        adopt("large.yaml")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        adopt("bytes.yaml")
    with pytest.raises(UsageError, match=r"there is no gone\.yaml"):
        adopt("gone.yaml")


def test_a_name_too_long_for_a_path_is_no_path() -> None:
    Path("Modelfile").write_text(f"FROM {'9' * 400}\n", encoding="utf-8")
    adopt("Modelfile")
    assert len(ServerFile.read(Path("llmserve.toml")).models) == 1


def test_an_error_is_one_line_whatever_was_typed() -> None:
    with pytest.raises(UsageError) as error:
        adopt("vllm serve a/b '\n")
    assert "\n" not in str(error.value)
