"""The scripted Triton of ``llmserve.testing``: what it leaves behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmserve.client import connect
from llmserve.errors import RequestTimeoutError
from llmserve.testing import ScriptedTriton


def test_a_process_ends_although_an_answer_was_held() -> None:
    code = """if True:
        from llmserve.client import connect
        from llmserve.errors import RequestTimeoutError
        from llmserve.testing import ScriptedTriton
        with ScriptedTriton(hold=2).serving() as url, connect(url) as client:
            try:
                client.generate("whole", "Hi", timeout=0.5)
            except RequestTimeoutError:
                print("late")
    """
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "late\n"


def test_it_may_serve_again() -> None:
    triton = ScriptedTriton(finish="silent")
    for _ in range(2):
        late = pytest.raises(RequestTimeoutError)
        with triton.serving() as url, connect(url) as client, late:
            client.generate("pieces", "Hi", timeout=0.5)
