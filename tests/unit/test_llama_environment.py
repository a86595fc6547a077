"""What runs llama.cpp's server for the benchmarks."""

from __future__ import annotations

from tests.llama_environment import SCRIPT


def test_the_script_that_starts_the_server_is_there() -> None:
    assert SCRIPT.is_file()
