"""In an image for several kinds of model, some have packages that the others do not see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.runtime import own_packages

HOOK = "import llmserve.runtime.own_packages as own; own.use()"
START = """
import site, sys
# As Python itself reads the file when it starts.
site.addsitedir(sys.argv[1])
import colorsys, subprocess
child = [sys.executable, "-c", "import colorsys; print(colorsys.__file__)"]
print(colorsys.__file__)
print(subprocess.run(child, capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize(
    ("words", "uses"),
    [
        (["/models/llama_python/1/model.py", "triton_python_backend_shm_region_1"], True),
        (["/models/ensemble/1/model.py", "triton_python_backend_shm_region_1"], False),
        (["/models/llama_python_2/1/model.py"], False),
        (["llama_python"], False),
    ],
)
def test_a_process_has_the_packages_of_the_model_that_it_runs(
    tmp_path: Path, words: list[str], uses: bool
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "hook").mkdir()
    # A module of the standard library, so that only the place in the path decides.
    (own / "colorsys.py").write_text("")
    (tmp_path / "hook" / "llmserve.pth").write_text(HOOK)
    (tmp_path / "start.py").write_text(START)
    env = {
        **os.environ, own_packages.PACKAGES: str(own), own_packages.MODELS: "gpt2 llama_python",
    }  # fmt: skip
    command = [sys.executable, str(tmp_path / "start.py"), str(tmp_path / "hook"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert [line == str(own / "colorsys.py") for line in done.stdout.split()] == [uses, uses]
    assert not done.stderr


def test_without_the_variables_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own_packages.PACKAGES, raising=False)
    before = list(sys.path)
    own_packages.use(Path("/nowhere"))
    assert sys.path == before
