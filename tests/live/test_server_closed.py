"""What changes a server is closed to everyone who reaches its ports, whatever bytes they send."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.repository import dockerfile
from llmserve.repository.manifest import Manifest
from llmserve.server import Server, start
from llmserve_deploy.description import describe
from llmserve_deploy.targets import files_of
from tests.intruder import (
    PREFIX,
    as_another_user,
    call,
    lines,
    open_over_grpc,
    open_over_http,
    secrets_of,
    spellings,
)
from tests.live.emitted import running
from tests.live.servers import ECHO, repository, settings
from tests.wire import over_grpc, over_http

# Interfaces of the test itself. A line break in the value keeps client libraries out and nobody
# else, and the name has no colon, so whoever reads the command line gets in.
OLD_LOCK = "statistics:llmserve-key=no\nkey"
USABLE = "statistics:llmserve-key=sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = repository(tmp_path_factory.mktemp("models"), echo=ECHO, other=ECHO)
    open_to_attack = (f"--grpc-restricted-protocol={OLD_LOCK}", f"--http-restricted-api={USABLE}")
    # As `serve` starts it.
    options = settings(folder, renewable=True, models=("echo",), extra_args=open_to_attack)
    with start(options) as running:
        yield running


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_the_attack_gets_in_where_it_can(server: Server) -> None:
    """Otherwise the other tests would show nothing."""

    def over_both() -> tuple[list[bool], list[bool]]:
        _, (name, value) = secrets_of(server.pid, "grpc-restricted-protocol")
        with over_grpc(port_of(server.grpc_url)) as connection:
            outcomes = [call(connection, "ModelStatistics", b"", {}).accepted]
        for spelling in spellings(PREFIX + name, value):
            with over_grpc(port_of(server.grpc_url)) as connection:
                outcomes.append(call(connection, "ModelStatistics", b"", spelling).accepted)
        _, (name, value) = secrets_of(server.pid, "http-restricted-api")
        port = port_of(server.http_url)
        answers = [over_http(port, "v2/models/stats", line) for line in [b"", *lines(name, value)]]
        return outcomes, [answer.startswith(b"HTTP/1.1 200") for answer in answers]

    grpc, http = as_another_user(over_both)
    # Without the header, then as a literal of three kinds, from the table, in Huffman's code,
    # twice, and in several frames.
    assert grpc[:9] == [False, *[True] * 8]
    assert http[:2] == [False, True]


def test_the_command_line_opens_nothing_over_grpc(server: Server) -> None:
    assert as_another_user(lambda: open_over_grpc(server.pid, port_of(server.grpc_url))) == []


def test_the_command_line_opens_nothing_over_http(server: Server) -> None:
    assert as_another_user(lambda: open_over_http(server.pid, port_of(server.http_url))) == []


def test_an_emitted_dockerfile_closes_the_same_and_loads_what_it_names(tmp_path: Path) -> None:
    folder = repository(tmp_path / "models", echo=ECHO, other=ECHO)
    image = "nvcr.io/nvidia/tritonserver:{}-trtllm-python-py3"
    older = Manifest(
        "other", "", "", "", {}, {}, {}, {}, {}, False, "", image=image.format("25.06")
    )
    newer = replace(older, name="echo", image=image.format("26.07"))
    # Two engines, which no image serves together.
    text = dockerfile.of_repository({"echo": newer, "other": older}, "echo")
    (link,) = re.findall(r"^RUN (mkdir (?:.*\\\n)*.*)", text, re.MULTILINE)
    command = json.loads(text.partition("CMD ")[2].replace("\\\n", ""))
    (tmp_path / "run").mkdir()
    with running(command, folder, tmp_path / "run", before=link) as triton:
        assert triton.models() == {"echo"}
        assert triton.opened() == []


def test_a_deployed_triton_is_closed_and_loads_only_the_chosen_models(tmp_path: Path) -> None:
    """The command in the files, with this machine's paths and ports, attacked by another user."""
    models = repository(tmp_path / "models", echo=ECHO, other=ECHO)
    deployed = describe(models, baked=True, models=("echo",))
    pod = files_of("kubernetes", deployed, tmp_path, dashboard=False)["base/deployment.yaml"]
    spec = pod["spec"]["template"]["spec"]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    (command,) = [c["args"] for c in containers if c["name"] == "triton"]
    (tmp_path / "run").mkdir()
    with running(command, models, tmp_path / "run") as triton:
        assert triton.models() == {"echo"}
        assert triton.opened() == []
