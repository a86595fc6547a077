"""However a server ends, nothing is left of it; and its models see what its parent sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from llmserve.errors import UsageError
from llmserve.server import start
from tests.live.servers import (
    ECHO,
    SLOW,
    eventually,
    left_of,
    name_of,
    repository,
    settings,
)


def test_stopped_or_killed_it_leaves_nothing(tmp_path: Path) -> None:
    options = settings(repository(tmp_path, echo=ECHO))
    with start(options) as running:
        name = name_of(running)
        assert left_of(name)
        with pytest.raises(UsageError, match="explicit"):
            running.unload("echo")
    assert left_of(name) == []
    assert not running.log_file.exists()
    running.stop()

    killed = start(options)
    name = name_of(killed)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(10) == 128 + signal.SIGKILL
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
    assert any(until in line for line in process.stdout)
    [scratch] = [path for path in temporary.iterdir() if path.is_dir()]
    return process, scratch.name.rsplit("-", 1)[0]


@pytest.mark.parametrize("model", [ECHO, SLOW], ids=["ready", "loading"])
def test_when_its_parent_is_killed_it_ends(tmp_path: Path, model: str) -> None:
    repository(tmp_path / "models", one=model)
    process, name = run_script(tmp_path, "READY" if model is ECHO else "loading=('one',)")
    with process:
        process.kill()
    eventually(lambda: left_of(name) == [])
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_dir()]


def test_ctrl_c_during_the_start_ends_it(tmp_path: Path) -> None:
    repository(tmp_path / "models", one=SLOW)
    process, name = run_script(tmp_path, "loading=('one',)")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert left_of(name) == []
    assert list((tmp_path / "tmp").iterdir()) == []


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
        timeout=60,
        check=False,
    )
    assert "READY" in done.stdout, done.stderr
