"""Starting a server: its command line, its ports, its runtime; and reading its log."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.contract.address import Address
from llmserve.contract.container import NEWEST, release
from llmserve.errors import PortInUseError, ServerError, UsageError
from llmserve.plugins.roles import Backend
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Repository
from llmserve.server import (
    ServerSettings,
    startup,
)
from llmserve.server.checks import find_problems, first_available, with_dependents
from llmserve.server.find import embedded, stub_site
from llmserve.server.find.launch import (
    Instance,
    docker_arguments,
    server_command,
    triton_args,
)
from llmserve.server.run.log import LoadProgress, ServerLog, in_plain_words
from llmserve.server.run.readiness import ModelsFailedError
from llmserve.server.server import Server, stand_ins
from llmserve.server.settings import Ports, choose_ports, port_problems
from llmserve.testing.web import metrics_page

CURRENT = release(NEWEST)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(Ports("127.0.0.1", 1, 2, 3), tmp_path / "scratch", "llmserve-test")


def test_models_get_the_packages_although_python_has_a_sitecustomize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's and Ubuntu's Python have one in the standard library, before all packages."""
    first = tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text("print('runs as well')\n")
    monkeypatch.syspath_prepend(str(first))
    programs = stub_site.write(tmp_path / "stub")
    code = "import sys, llmserve, numpy; print(sys.prefix, sys.executable)"
    done = subprocess.run(
        [programs / "python3", "-c", code],
        env={"PYTHONPATH": str(first)}, cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["runs as well", f"{sys.prefix} {sys.executable}"], done


def test_no_server_is_started_in_the_mode_in_which_it_loads_models_on_request(
    instance: Instance,
) -> None:
    for renewable in (False, True):
        settings = ServerSettings(Path("m"), renewable=renewable, models=("a", "b"))
        arguments = triton_args(settings, instance, CURRENT)
        modes = [word for word in arguments if word.startswith("--model-control-mode=")]
        assert modes == ["--model-control-mode=poll"] * renewable
        assert not [word for word in arguments if word.startswith("--load-model")]


def test_a_container_gets_ports_and_mounts_and_never_the_token(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = ServerSettings(tmp_path, image="triton:test", extra_args=("--log-verbose=1",))
    arguments = docker_arguments(settings, instance, CURRENT, gpus=False)
    image = arguments.index("triton:test")
    before, inside = arguments[:image], arguments[image + 1 :]
    assert {
        "--env=HF_TOKEN",
        "--publish=127.0.0.1:1:8000",
        "--publish=127.0.0.1:2:8001",
        "--publish=127.0.0.1:3:8002",
        f"--mount=type=bind,source={tmp_path},target=/models,readonly",
        f"--mount=type=bind,source={tmp_path},target=/hf",
    } <= set(before)
    assert not {"--env=HF_HUB_OFFLINE", "--gpus=all"} & set(before)
    assert "hf_secret" not in " ".join(arguments)
    assert (inside[0], inside[-1]) == ("tritonserver", "--log-verbose=1")
    assert {"--model-repository=/models", "--http-port=8000"} <= set(inside)
    assert "--gpus=all" in docker_arguments(settings, instance, CURRENT, gpus=True)
    settings = ServerSettings(tmp_path / 'a,"b', models=("one",), mounts=(Path("/data"),))
    mounts = [
        a for a in docker_arguments(settings, instance, CURRENT, gpus=False) if "--mount" in a
    ]
    assert mounts[:2] == [
        f'--mount=type=bind,"source={tmp_path}/a,""b/one",target=/models/one,readonly',
        "--mount=type=bind,source=/data,target=/data,readonly",
    ]


def test_a_container_makes_links_for_models_of_others(instance: Instance, tmp_path: Path) -> None:
    for name in ("own", "ours"):
        (tmp_path / name).mkdir()
    settings = ServerSettings(tmp_path, texts={"own": ("PROMPT", "ANSWER")})
    *_, shell, flag, command = docker_arguments(settings, instance, CURRENT, gpus=False)
    assert (shell, flag) == ("sh", "-c")
    assert "/models/ours /tmp/selected" in command
    assert 'value { string_value: "ANSWER" }' in command
    assert " && exec tritonserver --model-repository=/tmp/selected --id=" in command


def test_auto_prefers_a_server_on_path_and_names_all_runtimes_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setattr("llmserve.server.find.launch._DEFAULT_BINARY", tmp_path / "nothing")
    with pytest.raises(ServerError) as caught:
        first_available()
    for reason in ("binary: no tritonserver", "embedded: ", "docker: no docker command"):
        assert reason in caught.value.problem
    (tmp_path / "tritonserver").write_text("#!/bin/sh\n")
    (tmp_path / "tritonserver").chmod(0o755)
    assert first_available() == "binary"


def test_the_embedded_server_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "too_new_numpy", lambda: "2.1.0")
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    with pytest.raises(ServerError, match=r"numpy<2 and this is 2\.1\.0: .*pip install"):
        embedded.find_embedded()


def test_a_model_of_several_processes_has_its_own_launch_script(
    tmp_path: Path, instance: Instance
) -> None:
    def command(*models: str) -> tuple[str, ...]:
        settings = ServerSettings(tmp_path, models=models)
        return server_command(settings, "tritonserver", ("--id=x",), repository="/m")

    assert command() == ("tritonserver", "--model-repository=/m", "--id=x")
    for name in ("llama", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama" / "launch.sh").touch()
    assert command() == ("sh", "/m/llama/launch.sh", "/m", "--id=x")
    assert "sh" in docker_arguments(ServerSettings(tmp_path), instance, CURRENT, gpus=False)
    (tmp_path / "other" / "launch.sh").touch()
    with pytest.raises(ServerError, match="llama and other each start a server"):
        command()
    assert command("other")[1] == "/m/other/launch.sh"


def test_the_settings_of_the_user_for_threads_and_memory_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(**variables: str) -> dict[str, str]:
        with monkeypatch.context() as patched:
            for name in [*os.environ]:
                if name.startswith(("MALLOC_", "GOMP_", "OMP_WAIT")) or name == "GLIBC_TUNABLES":
                    patched.delenv(name)
            for name, value in variables.items():
                patched.setenv(name, value)
            return dict(embedded.environment(tmp_path, tmp_path))

    default = environment()
    assert default["ORT_DISABLE_TELEMETRY"] == "1"
    assert int(default["GOMP_SPINCOUNT"]) > 0
    assert int(default["MALLOC_TRIM_THRESHOLD_"]) > int(default["MALLOC_MMAP_THRESHOLD_"]) > 0
    assert environment(GOMP_SPINCOUNT="7")["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in environment(OMP_WAIT_POLICY="passive")
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        variables = environment(**{name: "1"})
        assert variables[name] == "1"
        assert "MALLOC_MMAP_THRESHOLD_" not in variables


@pytest.mark.parametrize("log", ["/dev/full", "gone/triton.log", ".", "fifo"])
def test_a_log_that_cannot_be_read_again_is_refused(tmp_path: Path, log: str) -> None:
    """The log contains the reason why a server does not start."""
    if log == "fifo":
        log = str(tmp_path.parent / f"{tmp_path.name}-fifo")
        os.mkfifo(log)
    (problem,) = find_problems(ServerSettings(tmp_path, log_file=tmp_path / log))
    assert problem.code == "usage"
    assert f"cannot write the log to {tmp_path / log}" in problem.message
    assert find_problems(ServerSettings(tmp_path, log_file=tmp_path / "triton.log")) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", ['backend: "acme"', 'platform: "acme_graph"'])
def test_a_model_whose_backend_is_missing_is_named(tmp_path: Path, config: str) -> None:
    for name, text in (("needy", config), ("plain", 'backend: "python"'), ("damaged", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    (problem,) = find_problems(ServerSettings(tmp_path, runtime="embedded", backends=()))
    assert (problem.where, problem.code) == ("needy", "config")
    assert "it needs Triton's backend 'acme'" in problem.message
    assert "llmserve-standins" in problem.hint
    acme = Backend(name="acme", summary="", folder=tmp_path)
    (problem,) = find_problems(ServerSettings(tmp_path, "embedded", backends=(acme,)))
    assert f"needy: its backend 'acme' has no {tmp_path}/model.py" in str(problem)
    (tmp_path / "model.py").touch()
    for settings in (
        ServerSettings(tmp_path, "embedded", models=("plain",), backends=()),
        ServerSettings(tmp_path, "embedded", backends=(acme,)),
        ServerSettings(tmp_path, "docker", backends=()),
    ):
        assert find_problems(settings) == []


@pytest.mark.parametrize("grace", [float("nan"), float("inf"), -1.0])
def test_an_invalid_grace_is_refused(tmp_path: Path, grace: float) -> None:
    (problem,) = find_problems(ServerSettings(tmp_path, grace=grace))
    assert "--grace" in str(problem)


def test_a_missing_repository_or_model_is_named(tmp_path: Path) -> None:
    (problem,) = find_problems(ServerSettings(tmp_path / "gone"))
    assert problem.error().exit_code == 3
    (tmp_path / "demo").mkdir()
    (problem,) = find_problems(ServerSettings(tmp_path, models=("dmeo",)))
    assert "no model 'dmeo'" in problem.message
    assert "demo" in problem.hint


def ports(http: int, grpc: int, metrics: int, host: str = "127.0.0.1") -> ServerSettings:
    return ServerSettings(
        Path("models"), host=host, http_port=http, grpc_port=grpc, metrics_port=metrics
    )


def test_every_taken_port_is_named_at_once() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        http, metrics = first.getsockname()[1], second.getsockname()[1]
        with pytest.raises(PortInUseError) as taken:
            choose_ports(ports(http, 0, metrics))
        assert len(port_problems(ports(http, 0, metrics))) == 1
        with pytest.raises(PortInUseError) as single:
            choose_ports(ports(0, http, 0))
    assert str(single.value) == (
        f"port {http} for grpc is in use on 127.0.0.1: --grpc-port 0 picks a free one"
    )
    assert str(taken.value) == (
        f"ports {http} for http and {metrics} for metrics are in use on 127.0.0.1: "
        "--http-port 0 --metrics-port 0 picks free ones"
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (ports(4711, 4711, 0), UsageError, "the same"),
        (ports(70000, 0, 0), UsageError, "70000 is not a port"),
        (ports(0, 0, 0, host="192.0.2.1"), ServerError, r"192\.0\.2\.1"),
        (ports(0, 0, 0, host="::1"), UsageError, "IPv4, not on ::1: give an IPv4 address"),
    ],
)
def test_invalid_ports_are_refused(
    settings: ServerSettings, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose_ports(settings)


# Triton 2.51 wrote these lines.
STAMP = "I1121 10:26:56.078072 3523 model_lifecycle.cc:472] "
LOADING = f'{STAMP}"loading: gpt2:1"\n'
LOADED = f"{STAMP}\"successfully loaded 'gpt2'\"\n"
FAILED = (
    "E1121 10:27:08.431067 3621 model_lifecycle.cc:642] \"failed to load 'bad' version 1: "
    r"Internal: ValueError: two\nlines: 'x'\n\nAt:\n  /m/bad/1/model.py(3): initialize\n"
    '"\n'
)
TAKEN = (
    'E1121 10:33:01.593574 4898 main.cc:245] "failed to start GRPC service: Unavailable - '
    "Socket '127.0.0.1:18050' already in use \"\n"
)
UNREADABLE = (
    'E1123 05:25:52.405163 6376 model_repository_manager.cc:1460] "Poll failed for model directory '
    "'newer': failed to read text proto from /tmp/x/models/newer/config.pbtxt\"\n"
)
STUCK = (
    "I1121 10:45:23.528517 10507 pb_stub.cc:2105]  Failed to preinitialize Python stub: "
    "Python model file not found in '/m/x/1/model.py'\n"
)
RAISED = (
    'I1125 15:45:27.965258 24669 pb_stub.cc:366] "Failed to initialize Python stub: ImportError: '
    r"cannot import name 'x'\n\nAt:\n  /site/a/1/b.py(5): f\n  /tmp/x/models/slow/1/model.py(5): "
    'initialize\\n"\n'
)
UNHEALTHY = (
    "E1125 15:45:34.873722 24669 model_lifecycle.cc:642] \"failed to load 'hung' version 1: "
    "Internal: Stub process 'hung_0_0' is not healthy.\"\n"
)
CRASH = "terminate called after throwing an instance of 'std::bad_alloc'\n 0# 0x55 in stub\n"
NONSENSE = "/opt/bin/tritonserver: unrecognized option '--nonsense'\nUsage: tritonserver\n"


def test_a_log_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FAILED)
    log = ServerLog(path)
    log.read()
    assert log.failures == {}, "what an earlier server wrote does not count"

    def read(text: str) -> ServerLog:
        with path.open("a") as file:
            file.write(text)
        log.read()
        return log

    assert read(LOADING).progress(1.0) == LoadProgress(1.0, loading=("gpt2",), ready=())
    assert read(LOADED).progress(2.0) == LoadProgress(2.0, loading=(), ready=("gpt2",))
    assert read(FAILED).failures == {"bad": "ValueError: two lines: 'x'"}
    assert read(FAILED.replace("ValueError", "ImportError")).hopeless == {"bad"}
    assert read(FAILED).hopeless == set()
    assert read(UNREADABLE).failures["newer"] == "this Triton cannot read its config.pbtxt"
    assert read(TAKEN).port_lost == "grpc"
    assert read(STUCK).stuck == "Python model file not found in '/m/x/1/model.py'"
    assert log.stuck_model is None
    assert read(STUCK.replace("/m/x", "/m/models/x")).stuck_model == "x"
    assert read(RAISED).raised == {"slow": "ImportError: cannot import name 'x'"}
    assert read(RAISED.replace("/tmp/x/", "/srv/models/7/1/")).raised.keys() == {"slow"}
    assert read(UNHEALTHY).unhealthy == {"hung"}
    assert read("llmserve: note: expect a tenth\n").notes == ["expect a tenth"]
    assert read(NONSENSE).why_it_ended() == "unrecognized option '--nonsense'"


def test_a_triton_that_has_gone_on_is_stuck_no_more_when_it_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ServerLog(path)
    path.write_text(LOADING + STUCK)
    log.read()
    log.forget("other")
    assert log.stuck, "gpt2 is still being loaded"
    path.write_text(LOADING + STUCK + LOADED)
    log.read()
    log.forget("other")
    assert log.stuck is None


def test_a_log_that_someone_empties_or_removes_ends_no_server(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FAILED)
    log = ServerLog(path)
    path.write_text(LOADED)
    log.read()
    assert log.loads["gpt2"] == 1
    path.unlink()
    log.read()
    path.write_text(LOADED)
    log.read()
    assert log.loads["gpt2"] == 1, "as long as what was read"
    path.write_text(LOADED * 2)
    log.read()
    assert log.loads["gpt2"] == 2


def test_the_line_that_may_explain_an_end_is_a_recent_one_and_no_ordinary_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    log = ServerLog(path)
    path.write_text("an older line\n")
    log.read()
    since = time.monotonic()
    assert log.last_words(since) == ""
    with path.open("a") as file:
        file.write(CRASH + LOADED)
    log.read()
    assert log.last_words(since).startswith("terminate called after")


def test_a_partial_server_is_not_started_again_with_the_same_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what another model's name explains, it would fail in the same way for ever."""
    (tmp_path / "repo" / "demo").mkdir(parents=True)
    (tmp_path / "repo" / "demo" / "config.pbtxt").touch()
    starts = []

    def fail(settings: ServerSettings, _: object) -> Server:
        starts.append(settings)
        assert len(starts) == 1
        raise ModelsFailedError({"other": "no weights"}, ServerLog(tmp_path / "log"))

    monkeypatch.setattr(startup, "_start_once", fail)
    settings = ServerSettings(tmp_path / "repo", runtime="binary", partial=True)
    with pytest.raises(ModelsFailedError, match="'other' failed to load: no weights"):
        startup.start(settings)


@pytest.mark.parametrize("code", [200, 400, 404, 503, 0])
def test_only_an_answer_says_that_a_model_takes_no_requests(code: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if code:
                self.send_response(code)
                self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.handle_request).start()
        server = object.__new__(Server)
        server.address = Address("", f"http://127.0.0.1:{http.server_port}")
        if code in (503, 0):
            with pytest.raises(ServerError):
                server.takes_requests("m")
        else:
            assert server.takes_requests("m") == (code == 200)


@pytest.mark.parametrize(
    ("code", "body"), [(404, b'{"error": {"message": "no"}}'), (404, b"no"), (200, b'["v1"]')]
)
def test_what_has_taken_the_port_meanwhile_is_no_ready_server(code: int, body: bytes) -> None:
    """Such as the gateway of another serve, whose errors have another shape."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server = object.__new__(Server)
        server.address = Address("", f"http://127.0.0.1:{http.server_port}")
        assert not server.ready()
        http.shutdown()


def test_a_model_fails_with_its_part_and_takes_its_other_parts_along(tmp_path: Path) -> None:
    def add(name: str, *parts: str) -> None:
        (tmp_path / name).mkdir()
        Manifest(
            name=name, recipe="r", plugin="p", exchange="stream", source={}, options={},
            components={}, contract={}, packages={}, trust_remote_code=False, llmserve="1",
            parts=parts,
        ).write(tmp_path / name)  # fmt: skip

    add("one", "tokens", "shared")
    add("two", "shared")
    add("tokens")
    add("shared")
    repository = Repository.open(tmp_path)
    assert with_dependents(repository, {"tokens": "no file"}) == {
        "tokens": "no file", "one": "its part tokens failed"
    }  # fmt: skip
    assert with_dependents(repository, {"one": "no file"}) == {
        "one": "no file", "tokens": "it is a part of one, which failed"
    }  # fmt: skip
    assert set(with_dependents(repository, {"shared": "no file"})) == {
        "shared", "one", "two", "tokens"
    }  # fmt: skip


def test_a_step_of_a_broken_ensemble_that_somebody_wrote_is_served(tmp_path: Path) -> None:
    for name in ("cut", "whole"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut/config.pbtxt").write_text('backend: "python"', encoding="utf-8")
    (tmp_path / "whole/config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "cut" } }', encoding="utf-8"
    )
    repository = Repository.open(tmp_path)
    assert with_dependents(repository, {"whole": "no file"}) == {"whole": "no file"}
    assert set(with_dependents(repository, {"cut": "no file"})) == {"cut", "whole"}


def test_progress_is_described_in_words_and_never_goes_back_to_the_start() -> None:
    steps = [
        LoadProgress(1.0, (), ()),
        LoadProgress(2.0, ("a", "b"), ("c",)),
        LoadProgress(3.0, (), ("a",)),
    ]
    assert [*map(str, steps)] == ["starting Triton", "loading a, b", "waiting until it is ready"]


@given(st.text())
def test_plain_words_are_one_line(reason: str) -> None:
    assert len(in_plain_words(reason).splitlines()) <= 1


PAGE = """
# TYPE llmserve_stand_in gauge
llmserve_stand_in{instead_of="TensorRT-LLM",model="llama_tensorrt_llm"} 1
llmserve_stand_in{instead_of="Triton's backend onnxruntime",model="gpt2_generator"} 1
llmserve_stand_in{instead_of="TensorRT-LLM",model="gone"} 0
nv_inference_count{model="plain",version="1"} 7
"""


def test_every_part_with_a_stand_in_is_named() -> None:
    with metrics_page(PAGE) as url:
        assert stand_ins(f"{url}/metrics") == {
            "llama_tensorrt_llm": "TensorRT-LLM",
            "gpt2_generator": "Triton's backend onnxruntime",
        }
    with metrics_page('nv_inference_count{model="plain"} 7\n') as url:
        assert stand_ins(f"{url}/metrics") == {}
    assert stand_ins("http://127.0.0.1:1/metrics") == {}


def test_texts_that_a_model_does_not_have_are_found_before_it_starts(tmp_path: Path) -> None:
    for name, config in (
        ("a", 'input { name: "PROMPT" } output { name: "ANSWER" }'),
        ("asked", 'backend: "python"'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(config)

    def found(**texts: tuple[str, str]) -> list[str]:
        return [str(each) for each in find_problems(ServerSettings(tmp_path, texts=texts))]

    assert found(a=("PROMPT", "ANSWER"), asked=("IN", "OUT")) == []
    assert found(a=("PROMTP", "ANSWER")) == [
        "a: models.a.input of llmserve.toml: it has no input 'PROMTP': did you mean 'PROMPT'?"
    ]
    assert found(a=("PROMPT", "text_output"))[0].endswith("no output 'text_output': choose one of "
                                                          "ANSWER")  # fmt: skip
