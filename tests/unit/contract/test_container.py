"""What each release of Triton accepts, and that every command emitted for one is accepted by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.contract.container import (
    LOCK,
    LOOPBACK,
    NEWEST,
    SERVERS,
    UNKNOWN,
    Release,
    closed,
    release,
    release_from_help,
    release_of_server,
    select,
    triton_of,
)
from llmserve.errors import ServerError
from llmserve.repository import dockerfile
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Repository
from llmserve.server import ServerSettings
from llmserve.server.find.embedded import BUNDLED, RELEASE, find_embedded
from llmserve.server.find.launch import (
    Instance,
    Launch,
    docker_arguments,
    prepare_binary,
    triton_args,
)
from llmserve.server.settings import Ports
from tests.wire import ADDED, header, newest, over_grpc

ALL = [release(name) for name in SERVERS]
MODEL = Manifest("m", "", "", "", {}, {}, {}, {}, {}, False, "", parts=("part",))


def help_of_embedded() -> str:
    home = find_embedded()
    libraries = home.parent.parent / BUNDLED
    done = subprocess.run(
        [home / "bin" / "tritonserver", "--help"],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_table_is_what_a_triton_says_of_itself() -> None:
    text = help_of_embedded()
    assert set(re.findall(r"^  --([a-z0-9-]+)", text, re.MULTILINE)) == RELEASE.options
    # The newest option that it knows is of 24.06, so it may be as old, and its gRPC as well.
    assert release_from_help(text).container == "24.06"
    assert release_of_server("2.51.0") == RELEASE


def test_a_release_is_known_by_its_first_options() -> None:
    assert "http-restricted-api" not in release("23.10").options
    assert "http-restricted-api" in release("23.11").options
    assert release("23.10").refused(["--id=x", "--http-restricted-api=x"]) == [
        "http-restricted-api"
    ]
    # What is newer than the table accepts what the newest in it does.
    assert release("26.12").options == release(NEWEST).options
    assert release_of_server("2.72.1").container == NEWEST
    assert release_of_server("nonsense") is UNKNOWN
    assert release_from_help("") == UNKNOWN


def emitted(triton: Release, folder: Path) -> Iterator[Sequence[str]]:
    """Return every command line of the core for a release."""
    image = f"nvcr.io/nvidia/tritonserver:{triton.container}-trtllm-python-py3"
    models = {"m": replace(MODEL, image=image), "other": replace(MODEL, name="other", image=None)}
    texts = [
        dockerfile.of_model("m", models["m"], folder),
        dockerfile.of_repository({"m": models["m"]}, "m"),
        dockerfile.of_repository(models, "m"),
    ]
    yield from (json.loads(t.partition("CMD ")[2].replace("\\\n", "")) for t in texts)
    instance = Instance(Ports(LOOPBACK, 1, 2, 3), folder, "llmserve-x")
    for renewable in (False, True):
        settings = ServerSettings(folder, renewable=renewable, otlp_endpoint="http://c")
        yield triton_args(settings, instance, triton)
        arguments = docker_arguments(settings, instance, triton, gpus=True)
        yield arguments[arguments.index("tritonserver") :]


@pytest.mark.parametrize("triton", ALL, ids=lambda triton: triton.container)
def test_every_command_is_accepted_by_the_release_that_it_is_for(
    triton: Release, tmp_path: Path
) -> None:
    commands = list(emitted(triton, tmp_path))
    assert len(commands) == 7
    for command in commands:
        assert triton.refused(command) == []
        assert not {"--model-control-mode=explicit", "--load-model=m"} & set(command)
        listens = {word for word in command if re.match("--(http|grpc|metrics)-address=", word)}
        if triton.closes:
            locked = [word for word in command if word.endswith(f":{LOCK}")]
            assert [word.partition("=")[0] for word in locked] == [
                "--http-restricted-api", "--grpc-restricted-protocol",
            ]  # fmt: skip
        else:
            assert {word.partition("=")[2] for word in listens} == {LOOPBACK}
            assert len(listens) == 3


def test_a_triton_that_cannot_be_closed_is_reached_from_this_machine_only(tmp_path: Path) -> None:
    old, new = (
        f"nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3" for tag in ("24.06", "24.07")
    )
    repository = Repository.open(tmp_path)
    for image in (old, None, "example.com/engine:latest"):
        command = dockerfile.docker_run(repository, "m", triton_of(image))
        assert " --network host " in command
        assert " -p " not in command
    assert f" -p {LOOPBACK}:8001:8001 " in dockerfile.docker_run(repository, "m", triton_of(new))
    instance = Instance(Ports(LOOPBACK, 1, 2, 3), tmp_path, "llmserve-x")
    words = docker_arguments(ServerSettings(tmp_path), instance, release("24.06"), gpus=False)
    assert "--network=host" in words
    assert "--grpc-port=2" in words
    assert not [word for word in words if word.startswith("--publish")]


HELP = "#!/bin/sh\necho 'Usage: tritonserver [options]\n  --help\n  --{option} <x>' >&2\nexit 1\n"


@pytest.mark.parametrize(
    ("version", "option", "server"),
    [
        ("2.72.0", "id", "2.72.0"),
        ("2.39.0\n", "id", "2.39.0"),
        (None, "http-max-input-size", "2.59.0"),
        (None, "id", "2.39.0"),
    ],
)
def test_an_installed_triton_is_asked_which_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    option: str,
    server: str,
) -> None:
    binary = tmp_path / "triton" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text(HELP.format(option=option))
    binary.chmod(0o755)
    if version:
        (tmp_path / "triton" / "TRITON_VERSION").write_text(version)
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    expected = release_of_server(server)

    def launch(host: str) -> Launch:
        scratch = tmp_path / host
        scratch.mkdir()
        instance = Instance(Ports(host, 1, 2, 3), scratch, "llmserve-x")
        return prepare_binary(ServerSettings(tmp_path, host=host), instance)

    command, notes = launch(LOOPBACK).argv, launch("127.0.0.2").notes
    assert expected.refused(command) == []
    assert ("--allow-client-shm=false" in command) == (version == "2.72.0")
    if expected.closes:
        assert "--grpc-address=0.0.0.0" in launch("0.0.0.0").argv
        assert notes == ()
    else:
        assert notes[0].startswith("every user of this machine can change ")
        with pytest.raises(ServerError, match=r"listens only on 127\.0\.0\.1: use a"):
            launch("0.0.0.0")


def test_the_grpc_that_is_installed_refuses_the_name_of_the_lock() -> None:
    """Newer than that of any Triton in the table; older ones are tried on a real Triton."""
    grpc = pytest.importorskip("grpc")

    class Anything(grpc.GenericRpcHandler):  # type: ignore[misc,name-defined]
        def service(self, _: object) -> object:
            return grpc.unary_unary_rpc_method_handler(lambda request, _: request)

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Anything(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        name, _, value = LOCK.encode().partition(b"=")
        for carried, accepted in ((b"llmserve-key", True), (name, False)):
            name = b"triton-grpc-protocol-" + carried
            for fields in (
                [header(name, value + b"\n")],
                [header(name, value, ADDED), newest()],
                [header(name, value, ADDED), newest(value)],
            ):
                with over_grpc(port) as connection:
                    assert connection.call("X", fields=fields).accepted is accepted
    finally:
        server.stop(0)


def test_what_a_client_does_not_read_is_bounded_where_triton_can() -> None:
    bounded = [t.container for t in ALL if "--grpc-max-response-pool-size=16384" in closed(t)]
    assert bounded == [name for name in SERVERS if name >= "25.03"]


def test_the_links_of_a_container_name_the_texts_of_what_others_wrote(tmp_path: Path) -> None:
    models, folder = tmp_path / "models", tmp_path / "selected"
    for name in ("own", "ours"):
        (models / name / "1").mkdir(parents=True)
        (models / name / "1/model.py").write_text(name)
        (models / name / "config.pbtxt").write_text('input { name: "PROMPT" }  # no end of line')
    # Of some, Triton finds out itself what they have.
    (models / "bare/1").mkdir(parents=True)
    texts = dict.fromkeys(("own", "bare"), ("PROMPT", "ANSWER"))
    command = select(["own", "ours", "bare"], str(folder), str(models), texts)
    for _ in range(2):  # A container that starts again has the links already.
        subprocess.run(["sh", "-c", command], check=True)
        assert (folder / "own/1/model.py").read_text() == "own"
        assert (folder / "ours/1/model.py").read_text() == "ours"
        own = Repository.open(folder).models["own"].config
        assert own is not None
        assert {name: each.string_value for name, each in own.parameters.items()} == {
            "llmserve.text_input": "PROMPT", "llmserve.text_output": "ANSWER"
        }  # fmt: skip
        assert [each.name for each in own.input] == ["PROMPT"]
        bare = Repository.open(folder).models["bare"].config
        assert bare is not None
        assert bare.parameters == own.parameters
        assert (
            folder / "ours/config.pbtxt"
        ).read_text() == 'input { name: "PROMPT" }  # no end of line'
    assert "llmserve" not in (models / "own/config.pbtxt").read_text()
