"""However a server ends, nothing is left of it; and its models see what its parent sees."""

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
from llmserve.server import Progress, start
from llmserve.server.process import GuardedProcess
from tests.live.servers import (
    ECHO,
    SLOW,
    eventually,
    left_of,
    name_of,
    repository,
    settings,
)


def command_above(process: int) -> bytes:
    """Return the command line of a process's parent."""
    stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    return Path(f"/proc/{stat.rpartition(')')[2].split()[1]}/cmdline").read_bytes()


def test_stopped_or_killed_it_leaves_nothing(tmp_path: Path) -> None:
    options = settings(repository(tmp_path, echo=ECHO))
    with start(options) as running:
        name = name_of(running.http_url)
        assert left_of(name)
        guard = command_above(running.pid)
        assert b"guard.py" in guard
        assert name.encode() in guard
        assert b"restricted" not in guard, "the key is for nobody else to read"
        with pytest.raises(UsageError, match="explicit"):
            running.unload("echo")
    assert left_of(name) == []
    assert not running.log_file.exists()
    running.stop()

    killed = start(options)
    name = name_of(killed.http_url)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(30) == 128 + signal.SIGKILL
    assert not killed.alive()
    eventually(lambda: left_of(name) == [])
    killed.stop()
    assert killed.log_file.exists(), "it tells why the server ended"
    killed.log_file.unlink()


SCRIPT = """
import sys
from pathlib import Path
from llmserve.server import ServerSettings, start

free = dict(http_port=0, grpc_port=0, metrics_port=0, runtime="embedded")
settings = ServerSettings(Path(sys.argv[1]), **free)
server = start(settings, on_progress=lambda step: print(step, flush=True))
print("READY", flush=True)
server.wait()
"""


def run_script(folder: Path, until: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server from another process; return that and the server's name at ``until``."""
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
        assert "READY" not in line, f"it is ready and never said {until!r}"
    else:
        pytest.fail(f"it ended and never said {until!r}")
    [scratch] = [path for path in temporary.iterdir() if path.is_dir()]
    return process, scratch.name.rsplit("-", 1)[0]


def test_when_its_parent_is_killed_while_it_loads_it_ends(tmp_path: Path) -> None:
    repository(tmp_path / "models", one=SLOW)
    process, name = run_script(tmp_path, "loading one")
    with process:
        process.kill()
    eventually(lambda: left_of(name) == [])
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_dir()]


@pytest.mark.alone
def test_ctrl_c_during_the_start_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    """Of Triton's own folders too, which it makes in /tmp whatever TMPDIR says, and only removes
    when it ends in order."""
    before = environments()
    repository(tmp_path / "models", one=SLOW)
    process, name = run_script(tmp_path, "loading one")
    made = eventually(lambda: environments() - before)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert left_of(name) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not made & environments()


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
        # As Ctrl-C would, once, while the server is given its time to end.
        monkeypatch.setattr(GuardedProcess, "wait", wait)
        raise KeyboardInterrupt

    running = start(options)
    monkeypatch.setattr(GuardedProcess, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.stop()
    assert not running.alive()
    eventually(lambda: not list((tmp_path / "tmp").iterdir()))

    def first(step: Progress) -> None:
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
def asked(name: str, marker: Path) -> Iterator[None]:
    """Have a model at work on a request that takes it two minutes."""
    with socket.create_connection(("127.0.0.1", http_port(name))) as client:
        client.sendall(request_to("one"))
        eventually(marker.exists, seconds=60)
        yield


def test_what_does_not_end_within_the_grace_is_cut_short(tmp_path: Path) -> None:
    """A model that hangs, or whose process is gone, keeps nobody waiting for longer."""
    marker = tmp_path / "busy"
    folder = repository(tmp_path / "models", one=BUSY.format(marker=str(marker)))
    running = start(settings(folder, grace=1.0))
    with running, asked(name_of(running.http_url), marker):
        begun = time.monotonic()
        running.stop()
    assert time.monotonic() - begun < 60


def request_to(model: str) -> bytes:
    tensor = {"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def http_port(name: str) -> int:
    """Read a server's port off its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if f"--id={name}".encode() in words:
                (port,) = [word[12:] for word in words if word.startswith(b"--http-port=")]
                return int(port)
    raise AssertionError(f"{name} does not run")


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
    """Both ways in which installers do it: a folder in a ``.pth`` file, and an import hook."""
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
    # What runs the tests, llmserve and numpy among it, comes along as plain folders.
    (packages / "tests.pth").write_text("\n".join(path for path in sys.path if path) + "\n")
    model = f"import plain, hooked, sys\nassert sys.prefix == {str(home)!r}\n"
    repository(tmp_path / "models", one=model + textwrap.dedent(ECHO))
    script = SCRIPT.replace("server.wait()", "server.stop()")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [home / "bin" / "python", "-c", script, tmp_path / "models"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "READY" in done.stdout, done.stderr
