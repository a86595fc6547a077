"""Commands that were written for a container, run on the embedded Triton."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmserve.contract.container import MODELS
from llmserve.server import ServerSettings
from llmserve.server.find import stub_site
from llmserve.server.find.embedded import environment, find_embedded, lay_out
from llmserve.server.settings import choose_ports
from tests.intruder import as_another_user, open_over_grpc, open_over_http
from tests.live.servers import eventually, fetch

# The embedded Triton is older than these options, and than the interface's being closed by default.
_SHIM = """#!/bin/sh
for word do
  shift
  case "$word" in
    --allow-client-shm=*|--grpc-max-response-pool-size=*) ;;
    *) set -- "$@" "$word" ;;
  esac
done
"""


@dataclass(frozen=True)
class Running:
    """A server that such a command has started."""

    pid: int
    http: int
    grpc: int

    def models(self) -> set[str]:
        return {model["name"] for model in fetch(f"{self._url}/v2/repository/index", {})}

    def opened(self) -> list[str]:
        """Return what another user can open with what the command line tells."""
        return as_another_user(
            lambda: [*open_over_grpc(self.pid, self.grpc), *open_over_http(self.pid, self.http)]
        )

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.http}"


@contextmanager
def running(
    command: Sequence[str], repository: Path, scratch: Path, *, before: str = ""
) -> Iterator[Running]:
    """Run a command with the paths and ports of this machine, after a command of the image."""
    home = find_embedded()
    backends, libraries = lay_out(home, scratch, ())
    ports = choose_ports(ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0))
    # Of an option that is given twice, Triton takes the last.
    own = [f"--backend-directory={backends}", f"--id={scratch.name}"]
    for name in ("http", "grpc", "metrics"):
        own += [f"--{name}-address=127.0.0.1", f"--{name}-port={getattr(ports, name)}"]
    shim = scratch / "bin" / "tritonserver"
    shim.parent.mkdir()
    shim.write_text(f'{_SHIM}exec {home}/bin/tritonserver "$@" {" ".join(own)}\n')
    shim.chmod(0o755)
    env = environment(libraries, stub_site.write(scratch / "python"))
    env["PATH"] = f"{shim.parent}{os.pathsep}{env['PATH']}"

    def here(word: str) -> str:
        def path(match: re.Match[str]) -> str:
            return str(repository if match[0] == MODELS else scratch / "selected")

        return re.sub(rf"(?<![\w/])({MODELS}|(/tmp)?/selected)(?=[/\s]|$)", path, word)

    if before:
        subprocess.run(["sh", "-c", here(before)], check=True)
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            [here(word) for word in command], env=env, stdout=log, stderr=log, cwd=scratch
        )

    def ready() -> bool:
        assert process.poll() is None, (scratch / "log").read_text(errors="replace")
        with suppress(OSError):
            fetch(f"http://127.0.0.1:{ports.http}/v2/health/ready")
            return True
        return False

    try:
        eventually(ready, 90)
        yield Running(process.pid, ports.http, ports.grpc)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
