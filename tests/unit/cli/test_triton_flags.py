"""Which of Triton's own options `serve` passes on, and that none opens or moves anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmserve.contract.container import (
    NEWEST,
    SERVERS,
    TUNING,
    UNKNOWN,
    addresses,
    closed,
    release,
)
from llmserve.errors import UsageError
from llmserve.server import ServerSettings
from llmserve.server.find.launch import Instance, triton_args
from llmserve.server.settings import Ports
from llmserve.server.tracing import trace_arguments
from llmserve_cli.group import cli
from llmserve_cli.triton_flags import triton_arguments


def test_a_flag_is_passed_on_with_or_without_its_dashes() -> None:
    flags = [
        "log-verbose=1",
        "--pinned-memory-pool-byte-size=0",
        "metrics-config=counter_latencies=true",
    ]
    assert triton_arguments(flags) == (
        "--log-verbose=1", "--pinned-memory-pool-byte-size=0",
        "--metrics-config=counter_latencies=true",
    )  # fmt: skip


def names(words: tuple[str, ...] | list[str]) -> set[str]:
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


def test_no_flag_is_one_that_serve_sets(tmp_path: Path) -> None:
    instance = Instance(Ports("127.0.0.1", 1, 2, 3), tmp_path, "llmserve-x")
    for container in SERVERS:
        triton = release(container)
        for renewable in (False, True):
            settings = ServerSettings(tmp_path, renewable=renewable)
            ours = names(triton_args(settings, instance, triton)) - {"backend-config"}
            assert not ours & TUNING
            assert not names([*addresses(triton, "0.0.0.0"), *closed(triton)]) & TUNING
    assert not names(trace_arguments("http://c")) & TUNING
    assert release(NEWEST).options >= TUNING


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        (f"{name}=1", f"does not set {name}: serve itself does")
        for name in sorted(release(NEWEST).options - TUNING)
    ]
    + [
        ("log-verbos=1", "does not set log-verbos: Triton has no such option: did you mean"),
        ("log-verbose", "takes NAME=VALUE, not 'log-verbose'"),
        ("log-verbose=1\n--http-port=1", "takes NAME=VALUE"),
        ("--http-address=0.0.0.0", "does not set http-address"),
        ("backend-config=python,shm-region-prefix-name=x", "does not set shm-region-prefix-name"),
    ],
)
def test_what_opens_moves_or_names_something_is_refused_by_its_name(
    flag: str, problem: str
) -> None:
    done = CliRunner().invoke(cli, ["serve", "--triton-flag", flag], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert problem in str(done.exception)


def test_a_flag_that_this_triton_does_not_have_is_refused_before_it_starts(tmp_path: Path) -> None:
    instance = Instance(Ports("127.0.0.1", 1, 2, 3), tmp_path, "llmserve-x")
    settings = ServerSettings(tmp_path, extra_args=("--http-max-input-size=1",))
    assert "--http-max-input-size=1" in triton_args(settings, instance, release("25.06"))
    assert "--http-max-input-size=1" in triton_args(settings, instance, UNKNOWN)
    with pytest.raises(
        UsageError, match=r"Triton 2\.51\.0 \(24\.10\) has no --http-max-input-size"
    ):
        triton_args(settings, instance, release("24.10"))
