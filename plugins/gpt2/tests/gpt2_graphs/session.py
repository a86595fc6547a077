"""A session driver whose generator is a real graph in the real stand-in, without a server."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.repository import config as modelconfig
from llmserve.runtime.params import Params
from llmserve.testing import FakeBackendUtils, FakeRequest, FakeResponse, make_parts
from llmserve.testing.fake import FakeInferenceRequest
from llmserve_gpt2.build import declare
from llmserve_gpt2.export.run import FORMATS, Exported, export
from llmserve_gpt2.session.driver import SessionDriver
from llmserve_gpt2.session.graph import Graph
from llmserve_gpt2.session.sequences import StepRequest
from llmserve_standins import graphs
from llmserve_standins.onnxruntime import model as onnx_model
from llmserve_standins.pytorch import model as torch_model

START, END = 1, 2
LOADERS: dict[str, Callable[[graphs.Place], graphs.Graph]] = {
    "onnx": onnx_model.load,
    "torchscript": torch_model.load,
}


class Generator:
    """A model of the stand-in that makes batches of what comes within a moment."""

    def __init__(self, form: str, home: Path, exported: Exported, moment: float) -> None:
        config = modelconfig.new_config("graph", backend="x", max_batch_size=16)
        declare(config, exported)
        config.sequence_batching.max_sequence_idle_microseconds = 60_000_000
        place = graphs.Place(home, "1", json.loads(_as_json(config)), None)
        self.serving = graphs.GraphModel(LOADERS[form](place), place, FakeBackendUtils())
        self.batches: list[int] = []
        self._moment = moment
        self._waiting: list[tuple[FakeRequest, Future[FakeResponse]]] = []
        self._lock = threading.Lock()

    def ask(self, asked: FakeInferenceRequest) -> FakeResponse:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in asked.inputs()}
        sequence, flags = asked.asked["correlation_id"], asked.asked["flags"]
        request = FakeRequest(inputs, sequence=sequence, flags=flags)
        future: Future[FakeResponse] = Future()
        with self._lock:
            self._waiting.append((request, future))
            first = len(self._waiting) == 1
        if first:
            threading.Event().wait(self._moment)
            with self._lock:
                waiting, self._waiting = self._waiting, []
            self.batches.append(len(waiting))
            answers = self.serving.execute([request for request, _ in waiting])
            for (_, other), answer in zip(waiting, answers, strict=True):
                other.set_result(answer)
        return future.result(timeout=60)


class Session:
    """A driver with its generator."""

    def __init__(
        self, form: str, home: Path, exported: Exported, moment: float = 0.003, **settings: Any
    ) -> None:
        self.generator = Generator(form, home, exported, moment)
        graph: dict[str, Any] = {
            "model": "graph",
            "context": exported.shape.context,
            "eos_ids": [],
            "slots": 16,
            "longest": exported.shape.context,
            "gap": 1000,
        }
        (home / "1" / "graph.json").write_text(json.dumps(graph))
        given = {
            "slots": 16,
            "idle_seconds": 60.0,
            "most_tokens": 16,
            "resent": False,
            "wait_seconds": 1.0,
        }
        self.pauses: list[float] = []
        self.driver = SessionDriver({**given, **settings}, home, pause=self.pauses.append)
        parts = make_parts(Graph({}, home / "1"), tokenizer=Letters(), decoupled=False)
        utils = FakeBackendUtils(models={"graph": self.generator.ask})
        self.driver.start(replace(parts, pb_utils=utils))

    def ask(self, *requests: FakeRequest) -> None:
        self.driver.execute(requests)

    @property
    def open(self) -> int:
        """How many caches the generator holds."""
        return len(self.generator.serving.kept)


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(letter) - 160 for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode(str(messages))

    def decode(self, ids: Any) -> str:
        return "".join(chr(160 + token) for token in ids)


def request(
    key: int,
    prompt: tuple[int, ...] = (),
    *,
    step: int | None = None,
    flags: int = 0,
    **params: Any,
) -> FakeRequest:
    """Return what the first stage would hand on."""
    request = StepRequest(Letters().decode(prompt), prompt, Params(**params), step)
    return FakeRequest(
        {
            "prompt_ids": np.array([prompt or (-1,)]),
            "params": np.array([[request.write().encode()]], np.object_),
            "READY": np.ones((1, 1), np.int32),
        },
        sequence=key,
        flags=flags,
    )


def tokens(answered: FakeRequest) -> list[int]:
    """Return the tokens that a request was answered with."""
    assert answered.error is None, answered.error
    (response,) = answered.responses
    return Letters().encode(piece(response))


def piece(response: FakeResponse, name: str = "piece") -> str:
    """Return a response's text."""
    text = response.tensors[name].reshape(-1)[0]
    return str(text.decode())


def export_to(form: str, home: Path, model: Any) -> Exported:
    """Export a model into a model's folder, with the manifest that the stand-in asks for."""
    folder = home / "1"
    folder.mkdir(parents=True)
    exported = export(model, form, folder, name=form, report=lambda _: None)
    digest = hashlib.sha256(exported.file.read_bytes()).hexdigest()
    files = {f"1/{FORMATS[form].FILE}": digest}
    (home / "llmserve.json").write_text(json.dumps({"files": files}))
    return exported


def _as_json(config: Any) -> str:
    from google.protobuf import json_format

    return json_format.MessageToJson(config, preserving_proto_field_name=True)
