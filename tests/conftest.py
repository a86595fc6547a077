"""Settings and hooks that apply to all tests."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Other load on the machine slows down the drawing of examples, not the code under test.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session", autouse=True)
def _processes_can_be_interrupted() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and child processes inherit that."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests see no model that this user keeps, and leave none there."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home") / "llmserve"
        patch.setenv("LLMSERVE_HOME", str(folder))
        yield folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests that need the same models on the same worker, so that they share a Triton."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return GroupScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that all workers finish at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(_group(item.nodeid)))


_LONG = (
    "real/test_real_openvino.py",
    "real/test_real_answers.py",
    "live/test_scaffold.py",
    "live/test_readme.py",
    "reliability/test_serve.py",
)


def _rank(group: str) -> int:
    """Live tests of plugins take longest, then ``_LONG``, then other files that start a Triton."""
    if not group.endswith(".py"):
        return 0
    return 1 if group.endswith(_LONG) else 2 + ("live" not in group)


_OPENVINO = "plugins/openvino/tests/openvino_engine"
_SAME_MODELS = {
    "tests/reliability/test_requests.py": "plugins/iterative/tests",
    "plugins/deploy/tests/test_deploy_live.py": "plugins/iterative/tests",
    "plugins/examples/tokens/tests/test_tokens_conformance.py": "plugins/bench/tests",
    # The first ONNX export in a process spends 12 s on imports.
    "tests/contract/test_build.py": "plugins/gpt2/tests",
    # A model that is converted for one of them is reused by the others.
    f"{_OPENVINO}/test_openvino_build.py": _OPENVINO,
    f"{_OPENVINO}/test_openvino_engine.py": _OPENVINO,
}
_EVERY_RECIPE = (
    "plugins/gateway/tests/gateway_live/test_gateway_models_live.py::test_a_recipe_answers["
)


def _group(nodeid: str) -> str:
    """Each file is its own group, except files that share models: usually those of a plugin."""
    file = nodeid.partition("::")[0]
    if nodeid.startswith(_EVERY_RECIPE):
        # For example "openvino]" or "trtllm-llmapi]".
        plugin = re.split(r"\W", nodeid.removeprefix(_EVERY_RECIPE))[0]
        return _OPENVINO if plugin == "openvino" else f"plugins/{plugin}/tests"
    if file in _SAME_MODELS:
        return _SAME_MODELS[file]
    return file.rpartition("/")[0] if file.endswith(("_live.py", "_conformance.py")) else file
