"""What every emitted ``1/model.py`` imports: makes the parts, hands requests to the driver."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from llmserve.runtime.contract import MANIFEST, SCHEMA
from llmserve.runtime.outputs import declared_outputs
from llmserve.runtime.protocols import Driver, Parts
from llmserve.runtime.utf8 import reachable, use_utf8


class TritonPythonModel:
    """A model in one process of Triton: all parts of a fused one, or those of a stage."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Make the parts that the manifest names; Triton calls this once."""
        import triton_python_backend_utils as pb_utils

        # Before anything is read or imported that opens files.
        use_utf8()
        home = reachable(args["model_repository"])
        folder = home / args["model_version"]
        manifest = json.loads((home / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("schema") != SCHEMA:
            raise RuntimeError(
                f"built by llmserve {manifest.get('llmserve')}, whose manifest is of another "
                "form: build it again"
            )
        config = json.loads(args["model_config"])
        components = manifest["components"]
        contract = manifest["contract"]

        def made(role: str) -> Any:
            return _make(components[role], folder) if role in components else None

        # In a part of an ensemble another class drives what batching drives in a fused model.
        self._driver: Driver = made("stage" if "stage" in components else "batching")

        def start() -> None:
            self._driver.start(
                Parts(
                    name=args["model_name"],
                    tokenizer=made("tokenizer"),
                    generator=made("generator"),
                    formatter=made("formatter"),
                    inputs=frozenset(contract["inputs"]),
                    extras=frozenset(contract["extras"]),
                    batched=config["max_batch_size"] > 0,
                    decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled")),
                    defaults=contract["defaults"],
                    pb_utils=pb_utils,
                    outputs=declared_outputs(manifest),
                )
            )

        if getattr(self._driver, "has_thread", False):
            # OpenMP keeps helper threads for every thread that has computed, as long as it lives.
            # With those of this one there would be more than cores. The driver's would then sleep
            # where they wait for each other for a moment, which costs a quarter of all tokens.
            with ThreadPoolExecutor(1) as loader:
                loader.submit(start).result()
        else:
            start()
        # What was loaded stays. Python would look through it again and again, all requests
        # waiting, and most of all at the end: a process with torch in it takes a second for that.
        gc.collect()
        gc.freeze()

    def execute(self, requests: Sequence[Any]) -> Sequence[Any] | None:
        return self._driver.execute(requests)

    def is_ready(self) -> bool:
        """Say whether the model can answer; Tritons from 26.03 on ask, with every look at it.

        A driver with a thread of its own has this as well, for the thread may have ended.
        """
        return bool(getattr(self._driver, "is_ready", lambda: True)())

    def finalize(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None:
            driver.finalize()


def _make(component: Mapping[str, Any], folder: Path) -> Any:
    module, _, name = component["runtime"].partition(":")
    settings = _Settings(component["settings"], module.partition(".")[0])
    return getattr(import_module(module), name)(settings, folder)


class _Settings(dict[str, Any]):
    """What a part was built with. A part of another version may look for what is not there."""

    def __init__(self, settings: Mapping[str, Any], package: str) -> None:
        super().__init__(settings)
        self._package = package

    def __missing__(self, key: str) -> Any:
        raise BuiltByAnotherVersion(
            f"built by another version of {self._package}, which wrote no {key!r} down: "
            "build the model again"
        )


class BuiltByAnotherVersion(KeyError):
    """A model's manifest lacks what the installed parts need; Triton shows the name of this."""

    def __str__(self) -> str:
        return str(self.args[0])
