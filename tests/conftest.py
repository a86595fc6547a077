"""Settings and hooks that apply to all tests."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.comparing import compare_here
from tests.kept import KEPT

# As in llmserve.graphs: a test may import OpenVINO first.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

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
    """Tests see no model that this user keeps, and leave none there.

    What comparisons of weights have found is kept for all of them, and for the next run.
    """
    comparisons = KEPT / "comparisons"
    comparisons.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home") / "llmserve"
        folder.mkdir(mode=0o700)
        (folder / comparisons.name).symlink_to(comparisons)
        patch.setenv("LLMSERVE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _tests_that_tests_run_start_soon() -> Iterator[None]:
    """As pyproject.toml has it for those here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_ADDOPTS", "-p no:langsmith_plugin -p no:anyio")
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    """Also for the tests of plugins, where all are run."""
    session.config.add_cleanup(compare_here().undo)


_WORKER_DIED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests that need the same models on the same worker, so that they share a Triton."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return GroupScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        node.config.stash[_WORKER_DIED] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell a run that was cut short from one in which tests failed: these alone are run again.

    Nothing is after one that its user has interrupted.
    """
    died = session.config.stash.get(_WORKER_DIED, False)
    if died and session.exitstatus != pytest.ExitCode.INTERRUPTED:
        session.exitstatus = 70


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that all workers finish at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -_seconds(_group(item.nodeid)))


def _seconds(group: str) -> int:
    """About how long a group takes; those that start a Triton take longer than others."""
    own = 2 if "live" in group else 1
    return _LONG.get(group, own if group.endswith(".py") else 30)


_OPENVINO = "plugins/openvino/tests/openvino_engine"
_SAME_MODELS = {
    "tests/live/test_server_private.py": "plugins/iterative/tests",
    "tests/live/test_guide_sequences.py": "plugins/gpt2/tests",
    "tests/live/test_shared_streams.py": "plugins/iterative/tests",
    "tests/reliability/test_requests.py": "plugins/iterative/tests",
    "plugins/deploy/tests/test_deploy_live.py": "plugins/iterative/tests",
    "plugins/examples/tokens/tests/test_tokens_conformance.py": "plugins/bench/tests",
    # The first ONNX export in a process spends 12 s on imports.
    "tests/contract/test_build.py": "plugins/gpt2/tests",
    # A model that is converted for one of them is reused by the others.
    f"{_OPENVINO}/test_openvino_build.py": _OPENVINO,
    f"{_OPENVINO}/test_openvino_engine.py": _OPENVINO,
}
_LONG = {
    "plugins/iterative/tests": 180,
    "plugins/gpt2/tests": 140,
    "plugins/trtllm/tests": 130,
    _OPENVINO: 120,
    "tests/live/test_cli.py": 95,
    "tests/real/test_real_openvino.py": 90,
    "plugins/gateway/tests/gateway_live": 87,
    "tests/reliability/test_serve_alone.py": 86,
    "tests/reliability/test_serve.py": 85,
    "tests/real/test_real_answers.py": 80,
    "plugins/bench/tests": 75,
    "plugins/hf/tests": 74,
    "tests/live/test_scaffold.py": 60,
    "plugins/examples/priorities/tests": 40,
    "plugins/bench/tests/measuring/test_generator.py": 39,
    "tests/live/test_server.py": 38,
    "tests/live/test_server_surroundings.py": 37,
    "plugins/bench/tests/measuring/test_commands.py": 31,
    "tests/live/test_readme.py": 25,
    "tests/live/test_guides.py": 25,
    "tests/live/test_third_party.py": 25,
    "tests/reliability/test_replicas.py": 22,
    "tests/live/test_server_endings.py": 22,
    "tests/live/test_run.py": 21,
    "tests/reliability/test_kills.py": 18,
    "plugins/iterative/tests/iterative_engine/test_arrivals.py": 15,
}
"""Seconds on two cores; only their order counts."""
_EVERY_RECIPE = "tests/live/test_every_recipe.py::test_a_recipe_answers["


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
