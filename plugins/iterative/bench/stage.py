"""Everything that is measured, made when a row first asks for it and gone at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inprocess import make_engine
from served import rate
from shapes import Prompts, make_model, save
from workers import Worker

from llmserve.testing import LiveTriton
from llmserve_iterative.engine import Engine


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    shape: str
    dtype: str
    device: str
    rounds: int
    quick: bool
    ctranslate2_python: Path | None = None
    openvino_python: Path | None = None

    @property
    def batches(self) -> tuple[int, int, int]:
        """How many sequences at a time the rows of several batches have."""
        return (1, 8, 32) if self.device == "cpu" else (1, 16, 64)


class Stage:
    """The models, the server and the other engines."""

    def __init__(self, wishes: Wishes, stack: ExitStack) -> None:
        self.wishes = wishes
        self._stack = stack
        self.prompts = Prompts()

    @cached_property
    def folder(self) -> Path:
        """Where the model lies for those who read it from disk."""
        place = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return save(self.wishes.shape, self.wishes.device, place)

    @cached_property
    def reference(self) -> Any:
        """The model as transformers has it, in the type that is compared."""
        return make_model(self.wishes.shape, self.wishes.dtype, self.wishes.device)

    @cached_property
    def batching_reference(self) -> Any:
        """One more of it, because ``generate_batch`` changes a model's attention."""
        return make_model(self.wishes.shape, self.wishes.dtype, self.wishes.device)

    @cached_property
    def weight_bytes(self) -> int:
        """What a step has to read: every weight but the tables of which it needs a row."""
        model = self.reference
        head = model.get_output_embeddings().weight
        tables = {id(part.weight) for part in model.modules() if type(part).__name__ == "Embedding"}
        read = [p for p in model.parameters() if id(p) not in tables or p is head]
        return sum(p.numel() * p.element_size() for p in read)

    @cached_property
    def engine(self) -> Engine:
        """Our engine in this process."""
        model = make_model(self.wishes.shape, self.wishes.dtype, self.wishes.device)
        return make_engine(model, self.places)

    @property
    def places(self) -> int:
        """How many sequences at a time an engine has room for, here and on the server."""
        return max(32, *self.wishes.batches)

    @cached_property
    def triton(self) -> LiveTriton:
        """A real Triton."""
        place = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self._stack.enter_context(LiveTriton.start(place / "repository"))

    def build(self, batching: str, places: int) -> str:
        """Return our model's name on the server, with so many sequences at a time."""
        return self.triton.build(
            "iterative",
            str(self.folder),
            batching=batching,
            max_batch_size=places,
            dtype=self.wishes.dtype,
            device=self.wishes.device,
        )

    def through_triton(
        self, rows: int, tokens: int = 64, *, pieces: bool = False
    ) -> Callable[[], float]:
        """Return the measure of our model on the server: tokens a second."""
        return self.served(self.build("iterative", self.places), rows, tokens, pieces=pieces)

    def served(
        self, model: str, rows: int, tokens: int, *, pieces: bool = False
    ) -> Callable[[], float]:
        """Return the measure of any model on the server."""
        return lambda: rate(
            self.triton.server.grpc_url, model, self.prompts.texts(rows), tokens, pieces=pieces
        )

    @cached_property
    def whole_prefix(self) -> str:
        """The name of the baseline on the server."""
        name = "whole-prefix"
        ours = Path(__file__).with_name("whole_prefix")
        folder = self.triton.repository / name
        (folder / "1").mkdir(parents=True)
        shutil.copy(ours / "model.py", folder / "1")
        settings = {"checkpoint": self.folder, "device": self.wishes.device}
        added = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
            for key, value in settings.items()
        ]
        kind = "KIND_CPU" if self.wishes.device == "cpu" else "KIND_GPU"
        added.append(f"instance_group {{ kind: {kind} }}\n")
        config = (ours / "config.pbtxt").read_text() + "".join(added)
        (folder / "config.pbtxt").write_text(config)
        self.triton.server.load(name)
        return name

    @cached_property
    def ctranslate2(self) -> Worker | None:
        """CTranslate2, if its Python was named."""
        return self._worker(self.wishes.ctranslate2_python, "worker_ctranslate2.py")

    @cached_property
    def openvino(self) -> Worker | None:
        """OpenVINO GenAI, if its Python was named."""
        precision = {"bfloat16": "bf16", "float32": "f32"}[self.wishes.dtype]
        return self._worker(self.wishes.openvino_python, "worker_openvino.py", precision)

    def _worker(self, python: Path | None, script: str, *arguments: str) -> Worker | None:
        if python is None:
            return None
        return self._stack.enter_context(Worker.start(python, script, str(self.folder), *arguments))
