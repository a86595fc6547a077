"""What a build needs, as the metadata of the installed packages says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder import plan as plan_module
from llmserve.builder.plan import BuildSpec, dependencies_of, make_plan
from llmserve.plugins.registry import Registry
from tests.support import describe


def test_a_package_depends_on_what_it_needs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(
        tmp_path, "acme-here",
        requires=[
            "one>=2", "two.b[extra]>1 ; python_version >= '3'", "old ; python_version < '3'",
            "more ; extra == 'all'", "three",
        ],
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    assert [*dependencies_of("acme-here")] == ["one", "two.b", "three"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, GeneratorExit])
def test_what_ends_a_build_from_outside_is_no_error_of_a_component(
    end: type[BaseException],
) -> None:
    plan = make_plan(BuildSpec("hf", "demo"), Registry.load())
    with pytest.raises(end), plan.errors_of("batching", "prepare"):
        raise end


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "balanced"])
def test_a_model_for_a_gpu_that_is_not_here_is_built_with_a_notice(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = BuildSpec("hf", "demo", options={"device": device})
    monkeypatch.setattr(plan_module, "has_gpu", lambda: False)
    (notice,) = make_plan(spec, Registry.load()).notices
    assert notice.startswith(f"note: this machine has no NVIDIA GPU, which device={device} needs")
    for other in ("auto", "cpu"):
        assert not make_plan(replace(spec, options={"device": other}), Registry.load()).notices
    monkeypatch.setattr(plan_module, "has_gpu", lambda: True)
    assert not make_plan(spec, Registry.load()).notices
