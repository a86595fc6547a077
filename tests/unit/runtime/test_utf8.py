"""Making a Python that decodes as ASCII, as the one in Triton's stub does, use UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Triton passes the model's folder as text; the environment arrives as bytes.
REACH = """
import os, subprocess
from llmserve.runtime.answer.utf8 import use_utf8, reachable
use_utf8()
home = os.environ['HOME']
assert home.isascii()
here = reachable(bytes.fromhex(os.environ['FOLDER']).decode())
print(open(home + '/a').read(), (here / 'a').read_text(),
      subprocess.run(['cat', here / 'a'], capture_output=True, text=True).stdout)
"""
LOST = """
import os
from llmserve.runtime.answer.utf8 import use_utf8
use_utf8()
print(ascii(os.environ['HOME']))
"""


def run(code: str, **env: str) -> str:
    # With these two variables, this Python behaves like the stub's.
    stub = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", **stub, **env}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout.decode()


def test_folders_whose_names_are_not_ascii_can_be_reached(tmp_path: Path) -> None:
    home = tmp_path / "Zoë" / "модели"
    home.mkdir(parents=True)
    (home / "a").write_text("found", encoding="utf-8")
    output = run(REACH, HOME=str(home), FOLDER=str(home).encode().hex())
    assert output == "found found found\n"
    # A folder that does not exist is left alone.
    assert run(LOST, HOME="/nowhere/Zoë") == "'/nowhere/Zo\\udcc3\\udcab'\n"
