"""However a server ends, it leaves nothing behind; its models see its parent's packages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llmserve.errors import UsageError
from llmserve.server import LoadProgress, start
from llmserve.server.run.process import GuardedProcess
from tests.live.servers import ECHO, SLOW, eventually, leftovers, name_of, repository, settings


def parent_command(process: int) -> bytes:
    """Return the command line of a process's parent."""
    stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    return Path(f"/proc/{stat.rpartition(')')[2].split()[1]}/cmdline").read_bytes()


def test_stopped_or_killed_it_leaves_nothing(tmp_path: Path) -> None:
    options = settings(repository(tmp_path, echo=ECHO))
    with start(options) as running:
        name = name_of(running.http_url)
        assert leftovers(name)
        guard = parent_command(running.pid)
        assert b"guard.py" in guard
        assert name.encode() in guard
        with pytest.raises(UsageError, match="cannot change its models"):
            running.drop("echo")
    assert leftovers(name) == []
    assert not running.log_file.exists()
    running.stop()

    killed = start(options)
    name = name_of(killed.http_url)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(30) == 128 + signal.SIGKILL
    assert not killed.alive()
    eventually(lambda: leftovers(name) == [])
    killed.stop()
    assert killed.log_file.exists(), "it shows why the server ended"
    killed.log_file.unlink()


SCRIPT = """
import sys
from pathlib import Path
from llmserve.server import ServerSettings, start

options = dict(http_port=0, grpc_port=0, metrics_port=0, runtime="embedded")
settings = ServerSettings(Path(sys.argv[1]), **options)
server = start(settings, on_progress=lambda step: print(step, flush=True))
print("READY", flush=True)
server.wait()
"""


def run_script(folder: Path, until: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server in another process, wait for ``until``, and return process and server name."""
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder / "models")],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if until in line:
            break
        assert "READY" not in line, f"it is ready and never printed {until!r}"
    else:
        pytest.fail(f"it ended and never printed {until!r}")
    [scratch] = [path for path in temporary.iterdir() if path.is_dir()]
    return process, scratch.name.rsplit("-", 1)[0]


def test_it_ends_if_its_parent_is_killed_while_it_loads(tmp_path: Path) -> None:
    repository(tmp_path / "models", one=SLOW)
    process, name = run_script(tmp_path, "loading one")
    with process:
        process.kill()
    eventually(lambda: leftovers(name) == [])
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_dir()]


@pytest.mark.alone
def test_ctrl_c_during_the_start_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    """This includes Triton's own folders, which it creates in /tmp whatever TMPDIR is, and removes
    only in an orderly shutdown."""
    before = environments()
    repository(tmp_path / "models", one=SLOW)
    process, name = run_script(tmp_path, "loading one")
    created = eventually(lambda: environments() - before)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    # Python's codecs add words of their own to one that comes while they look up a name.
    assert errors.rstrip().splitlines()[-1].startswith("KeyboardInterrupt"), errors
    assert leftovers(name) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not created & environments()


def environments() -> set[Path]:
    return set(Path("/tmp").glob("python_env_*"))


def test_a_second_ctrl_c_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    options = settings(repository(tmp_path / "models", echo=ECHO))
    wait = GuardedProcess.wait

    def interrupted(self: GuardedProcess, timeout: float | None) -> int | None:
        # Interrupt once, as Ctrl-C would, during the grace period of the server.
        monkeypatch.setattr(GuardedProcess, "wait", wait)
        raise KeyboardInterrupt

    running = start(options)
    monkeypatch.setattr(GuardedProcess, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.stop()
    assert not running.alive()
    eventually(lambda: not list((tmp_path / "tmp").iterdir()))

    def first(step: LoadProgress) -> None:
        monkeypatch.setattr(GuardedProcess, "wait", interrupted)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(options, on_progress=first)
    eventually(lambda: not list((tmp_path / "tmp").iterdir()))


BUSY = """
import time
from pathlib import Path
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        Path({marker!r}).touch()
        time.sleep(120)
        return [pb.InferenceResponse([]) for _ in requests]
"""


@contextmanager
def long_request(name: str, marker: Path) -> Iterator[None]:
    """Keep a model busy with a request that takes two minutes."""
    with socket.create_connection(("127.0.0.1", http_port(name))) as client:
        client.sendall(request_to("one"))
        eventually(marker.exists, seconds=60)
        yield


def test_a_model_that_exceeds_the_grace_period_is_killed(tmp_path: Path) -> None:
    """A model that hangs, or whose process has died, does not delay the end any longer."""
    marker = tmp_path / "busy"
    folder = repository(tmp_path / "models", one=BUSY.format(marker=str(marker)))
    running = start(settings(folder, grace=1.0))
    with running, long_request(name_of(running.http_url), marker):
        started = time.monotonic()
        running.stop()
    assert time.monotonic() - started < 60


def request_to(model: str) -> bytes:
    tensor = {"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def http_port(name: str) -> int:
    """Read a server's port from its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            args = (process / "cmdline").read_bytes().split(b"\0")
            if f"--id={name}".encode() in args:
                (port,) = [arg[12:] for arg in args if arg.startswith(b"--http-port=")]
                return int(port)
    raise AssertionError(f"{name} is not running")


EDITABLE_HOOK = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "hooked":
            return importlib.util.spec_from_file_location(name, {path!r})

sys.meta_path.append(Finder)
"""


def test_models_see_editable_installs_of_a_virtual_environment(tmp_path: Path) -> None:
    """Installers do this in two ways: with a folder in a ``.pth`` file, and with an import hook."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    [packages] = home.glob("lib/python*/site-packages")
    for name in ("plain", "hooked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("")
    (packages / "plain.pth").write_text(f"{tmp_path / 'plain'}\n")
    hook = EDITABLE_HOOK.format(path=str(tmp_path / "hooked" / "hooked.py"))
    (packages / "hook_finder.py").write_text(hook)
    (packages / "hooked.pth").write_text("import hook_finder\n")
    # The packages of the tests, llmserve and numpy included, are added as plain folders.
    (packages / "tests.pth").write_text("\n".join(path for path in sys.path if path) + "\n")
    model = f"import plain, hooked, sys\nassert sys.prefix == {str(home)!r}\n"
    repository(tmp_path / "models", one=model + textwrap.dedent(ECHO))
    script = SCRIPT.replace("server.wait()", "server.stop()")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [home / "bin" / "python", "-c", script, tmp_path / "models"],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "READY" in done.stdout, done.stderr
