"""The model that Triton loads: how it starts from a manifest."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmserve.contract.names import SCHEMA
from llmserve.contract.shared_stream import NUMBER
from llmserve.runtime.model import TritonPythonModel
from llmserve.testing import FakeBackendUtils, FakeRequest

Load = Callable[..., TritonPythonModel]


class Stage:
    """A part of an ensemble that holds many objects, as models do."""

    threshold = 0

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.objects: list[list[int]] = [[] for _ in range(1000)]

    def start(self, parts: Any) -> None:
        self.objects[0].append(1)
        Stage.threshold = gc.get_threshold()[0]


class Failing(Stage):
    def start(self, parts: Any) -> None:
        raise ValueError("the weights are cut short")


class Newer:
    """A part that needs a setting that builds of an older version do not have."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        assert "patience" not in settings
        assert settings.get("patience", 3) == 3
        self.pace, self.patience = settings["pace"], settings["patience"]


class Engine:
    """A generator that records which thread created it."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.created_in = threading.current_thread()


class Tuned:
    """A part whose library reads a variable when it is loaded."""

    @staticmethod
    def environment(settings: dict[str, Any], folder: Path) -> dict[str, str]:
        return {"LLMSERVE_TEST_SPIN": f"{settings['spin']} {folder.name}"}

    def __init__(self, settings: dict[str, Any], folder: Path) -> None: ...


class Loading:
    """A part that is created before the others, and loads the library."""

    spin = ""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        Loading.spin = os.environ.get("LLMSERVE_TEST_SPIN", "")


class Inline:
    """A driver that computes in the thread in which Triton calls it."""

    has_thread = False

    seen: tuple[threading.Thread, ...] = ()

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        del settings, folder

    def start(self, parts: Any) -> None:
        Inline.seen = (parts.generator.created_in, threading.current_thread())


class Counting(Inline):
    """A driver of a plugin that knows nothing of shared streams."""

    got: tuple[Any, ...] = ()

    def execute(self, requests: Any) -> None:
        Counting.got += tuple(requests)

    def finalize(self) -> None: ...


class Threaded(Inline):
    has_thread = True


class Ending(Inline):
    """A driver that says when it ends."""

    ended: list[str] = []

    def finalize(self) -> None:
        Ending.ended.append("driver")


class NotReady(Inline):
    def is_ready(self) -> bool:
        return False


class Formatter:
    def __init__(self, settings: dict[str, Any], folder: Path) -> None: ...


class Closed(Formatter):
    """A formatter that has something to close."""

    def close(self) -> None:
        Ending.ended.append("formatter")


def answering(driver: str, **others: str) -> dict[str, Any]:
    """Return the manifest of a model with this driver."""
    content = manifest(Stage)
    names = {"batching": driver, "generator": "Engine", **others}
    content["components"] = {
        role: {"runtime": f"{__name__}:{name}", "settings": {}} for role, name in names.items()
    }
    return content


def manifest(stage: type[Any], **settings: Any) -> dict[str, Any]:
    component = {"runtime": f"{__name__}:{stage.__name__}", "settings": settings}
    contract: dict[str, Any] = {"inputs": [], "extras": [], "defaults": {}}
    return {"schema": SCHEMA, "components": {"stage": component}, "contract": contract}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Initialize Triton's model with a manifest."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakeBackendUtils())

    def load(content: dict[str, Any], decoupled: bool = False) -> TritonPythonModel:
        (tmp_path / "llmserve.json").write_text(json.dumps(content))
        policy = {"decoupled": decoupled}
        config = json.dumps({"max_batch_size": 4, "model_transaction_policy": policy})
        names = {"model_name": "stage", "model_version": "1"}
        arguments = {"model_repository": str(tmp_path), "model_config": config, **names}
        model = TritonPythonModel()
        model.initialize(arguments)
        return model

    return load


@pytest.mark.parametrize("schema", [None, 0, 99])
def test_a_manifest_of_another_schema_is_refused_before_it_is_read(
    load: Load, schema: int | None
) -> None:
    with pytest.raises(RuntimeError, match=r"built by llmserve 9\.9.*build it again"):
        load({"llmserve": "9.9", "schema": schema})


def test_loaded_objects_are_excluded_from_garbage_collection(
    load: Load,
) -> None:
    before = gc.get_freeze_count()
    try:
        load(manifest(Stage))
        assert gc.get_freeze_count() - before > 1000
    finally:
        gc.unfreeze()


def test_garbage_is_looked_for_rarely_while_a_model_loads_and_as_before_afterwards(
    load: Load,
) -> None:
    before = gc.get_threshold()
    try:
        load(manifest(Stage))
        assert Stage.threshold > 10 * before[0]
        assert gc.get_threshold() == before
        with pytest.raises(ValueError, match="cut short"):
            load(manifest(Failing))
        assert gc.get_threshold() == before
    finally:
        gc.unfreeze()


def test_a_setting_that_an_older_build_does_not_have_is_an_error_with_the_fix(
    load: Load,
) -> None:
    with pytest.raises(KeyError) as caught:
        load(manifest(Newer, pace=1))
    package = __name__.partition(".")[0]
    assert str(caught.value) == (
        f"built by another version of {package}, which did not record 'patience': "
        "build the model again"
    )


def test_a_part_can_set_variables_before_any_part_is_created(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_TEST_SPIN", "0")
    content = manifest(Stage)
    content["components"] |= {
        role: {"runtime": f"{__name__}:{kind.__name__}", "settings": {"spin": 7}}
        for role, kind in (("formatter", Loading), ("tokenizer", Loading), ("generator", Tuned))
    }
    load(content)
    assert Loading.spin == "7 1"


@pytest.mark.parametrize("driver", [Inline, Threaded])
def test_loading_for_a_driver_with_its_own_thread_leaves_no_helpers_in_tritons_thread(
    load: Load, driver: type[Inline]
) -> None:
    load(answering(driver.__name__))
    created_in, started_in = Inline.seen
    assert created_in is started_in
    assert created_in.is_alive() is (driver is Inline)


def test_unloading_a_model_that_never_loaded_is_harmless() -> None:
    TritonPythonModel().finalize()


@pytest.mark.parametrize(
    ("formatter", "ended"), [("Formatter", ["driver"]), ("Closed", ["driver", "formatter"])]
)
def test_unloading_closes_a_formatter_that_can_be_closed_after_its_driver(
    load: Load, formatter: str, ended: list[str]
) -> None:
    Ending.ended.clear()
    load(answering("Ending", formatter=formatter)).finalize()
    assert Ending.ended == ended


@pytest.mark.parametrize(("driver", "ready"), [("Inline", True), ("NotReady", False)])
def test_a_model_is_ready_unless_its_driver_is_not(load: Load, driver: str, ready: bool) -> None:
    assert load(answering(driver)).is_ready() is ready


def test_a_request_that_opens_a_shared_stream_never_reaches_a_driver(load: Load) -> None:
    content = answering("Counting")
    content["contract"]["shared_stream"] = NUMBER
    model = load(content, decoupled=True)
    opening = FakeRequest({"text_input": [""]}, open_shared_stream="0" * 32)
    other = FakeRequest({"text_input": ["open_shared_stream"]}, note="open_shared_stream")
    assert model.execute([opening]) is None
    model.execute([opening_too := FakeRequest({}, open_shared_stream="x"), other])
    assert Counting.got == (other,)
    assert (opening.failure, opening.closed) == (None, False)
    assert opening_too.failure is not None
    model.finalize()
    assert opening.closed
