"""The class that every generated ``1/model.py`` imports: it passes requests to the driver."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from llmserve.contract.names import MANIFEST, SCHEMA, public_runtime
from llmserve.contract.shared_stream import NUMBER
from llmserve.contract.tasks import TOKENS
from llmserve.runtime.answer.outputs import declared_outputs
from llmserve.runtime.answer.shared_streams import SharedStreams
from llmserve.runtime.answer.utf8 import reachable, use_utf8
from llmserve.runtime.protocols import Driver, Parts


class TritonPythonModel:
    """A model in one Triton process: all parts of a fused model, or those of a stage."""

    _shared: SharedStreams | None = None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Create the parts that the manifest names; Triton calls this once."""
        import triton_python_backend_utils as pb_utils

        # Before any file is opened, also by an import.
        use_utf8()
        home = reachable(args["model_repository"])
        folder = home / args["model_version"]
        manifest = json.loads((home / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("schema") != SCHEMA:
            raise RuntimeError(
                f"built by llmserve {manifest.get('llmserve')}, whose manifest has another "
                "format: build it again"
            )
        config = json.loads(args["model_config"])
        components = manifest["components"]
        contract = manifest["contract"]

        def part(role: str) -> Any:
            return create(components[role], folder) if role in components else None

        for component in components.values():
            _set_environment(component, folder)
        # In a part of an ensemble, the stage is the driver; in a fused model, the batching is.
        self._driver: Driver = part("stage" if "stage" in components else "batching")

        def start() -> None:
            self._formatter = part("formatter")
            parts = Parts(
                name=args["model_name"],
                tokenizer=part("tokenizer"),
                generator=part("generator"),
                formatter=self._formatter,
                inputs=frozenset(contract["inputs"]),
                extras=frozenset(contract["extras"]),
                batched=config["max_batch_size"] > 0,
                decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled")),
                defaults=contract["defaults"],
                pb_utils=pb_utils,
                outputs=declared_outputs(manifest),
                answers=contract.get("answers", TOKENS),
                built=int((home / MANIFEST).stat().st_mtime),
            )
            if contract.get("shared_stream") == NUMBER and parts.decoupled:
                self._shared = SharedStreams(parts)
                parts = replace(parts, shared=self._shared)
            self._driver.start(parts)

        with _few_collections():
            if getattr(self._driver, "has_thread", False):
                # OpenMP keeps helper threads for every thread that has computed, until that thread
                # ends. With this thread's helpers, there would be more threads than cores, and the
                # driver's would sleep while they briefly wait for each other, which costs a quarter
                # of all tokens.
                with ThreadPoolExecutor(1) as loader:
                    loader.submit(start).result()
            else:
                start()
        # Everything loaded stays in use. Python would scan it repeatedly while all requests wait,
        # and once more at exit, which takes a second in a process with torch.
        gc.collect()
        gc.freeze()

    def execute(self, requests: Sequence[Any]) -> Sequence[Any] | None:
        # Here, not in the drivers: one of a plugin would generate an answer to such a request.
        if self._shared is not None and not (requests := self._shared.others(requests)):
            return None
        return self._driver.execute(requests)

    def is_ready(self) -> bool:
        """Return whether the model can answer; Triton 26.03 and later call it on readiness checks.

        A driver with its own thread has this method too, since the thread may have ended.
        """
        return bool(getattr(self._driver, "is_ready", lambda: True)())

    def finalize(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None:
            driver.finalize()
            if self._shared is not None:
                self._shared.close()
            # Only some formatters have this method.
            if close := getattr(getattr(self, "_formatter", None), "close", None):
                close()


def _set_environment(component: Mapping[str, Any], folder: Path) -> None:
    """Set the variables that a part's libraries read when they are loaded.

    That is before any part is created. A library that the module of another part imports at its
    top may have been loaded by then.
    """
    found, settings = _class_of(component)
    # Only some classes have this method.
    if environment := getattr(found, "environment", None):
        os.environ.update(environment(settings, folder))


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage rarely: nearly all of the million objects that a model is made of stay.

    With torch, this saves a twentieth of the time in which a small model loads.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def create(component: Mapping[str, Any], folder: Path) -> Any:
    """Create a part of a model, as its manifest describes it."""
    found, settings = _class_of(component)
    return found(settings, folder)


def _class_of(component: Mapping[str, Any]) -> tuple[Any, _Settings]:
    module, _, name = public_runtime(component["runtime"]).partition(":")
    settings = _Settings(component["settings"], module.partition(".")[0])
    return getattr(import_module(module), name), settings


class _Settings(dict[str, Any]):
    """The settings a part was built with; one of another version may look for missing keys."""

    def __init__(self, settings: Mapping[str, Any], package: str) -> None:
        super().__init__(settings)
        self._package = package

    def __missing__(self, key: str) -> Any:
        raise BuiltByAnotherVersion(
            f"built by another version of {self._package}, which did not record {key!r}: "
            "build the model again"
        )


class BuiltByAnotherVersion(KeyError):
    """A model's manifest lacks a setting that a part needs; Triton shows this class's name."""

    def __str__(self) -> str:
        return str(self.args[0])
