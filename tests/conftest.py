"""What holds for all tests."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Other work on the machine makes examples slow to draw; that says nothing of what is tested.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session", autouse=True)
def _processes_can_be_interrupted() -> Iterator[None]:
    """A shell starts background jobs deaf to Ctrl-C, and what they start would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share tests among workers so that who asks for the same models asks the same Triton."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with what takes longest, so that they end at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(_group(item.nodeid)))


_LONG = ("live/test_scaffold.py", "live/test_readme.py", "reliability/test_serve.py")


def _rank(group: str) -> int:
    """Plugins' live tests are the longest, then some files, then whatever starts a Triton."""
    if not group.endswith(".py"):
        return 0
    return 1 if group.endswith(_LONG) else 2 + ("live" not in group)


_OPENVINO = "plugins/openvino/tests/openvino_engine"
_SAME_MODELS = {
    "tests/reliability/test_requests.py": "plugins/iterative/tests",
    "plugins/deploy/tests/test_deploy_live.py": "plugins/iterative/tests",
    "plugins/examples/tokens/tests/test_tokens_conformance.py": "plugins/bench/tests",
    # The first export to ONNX of a process takes 12 s to import what does it.
    "tests/contract/test_build.py": "plugins/gpt2/tests",
    # A model that was converted for one of them is there for the others.
    f"{_OPENVINO}/test_openvino_build.py": _OPENVINO,
    f"{_OPENVINO}/test_openvino_engine.py": _OPENVINO,
}
_EVERY_RECIPE = (
    "plugins/gateway/tests/gateway_live/test_gateway_models_live.py::test_a_recipe_answers["
)


def _group(nodeid: str) -> str:
    """Each file is a group of its own, but for those that share models: a plugin's, as a rule."""
    file = nodeid.partition("::")[0]
    if nodeid.startswith(_EVERY_RECIPE):
        # As in "openvino]" or "trtllm-llmapi]".
        plugin = re.split(r"\W", nodeid.removeprefix(_EVERY_RECIPE))[0]
        return _OPENVINO if plugin == "openvino" else f"plugins/{plugin}/tests"
    if file in _SAME_MODELS:
        return _SAME_MODELS[file]
    return file.rpartition("/")[0] if file.endswith(("_live.py", "_conformance.py")) else file
