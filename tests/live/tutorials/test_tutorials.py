"""The models of five tutorials, examined beside the demo model: the page lists their faults.

Each is written as its tutorial describes it, with the faults that this has. The page's table says
which check names which fault.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc

from llmserve.demo import demo_model_path
from llmserve.repository.repository import Model
from llmserve.testing import LiveTriton
from llmserve_certify.checkpoint import Checkpoint
from llmserve_certify.checks import CHECKS
from llmserve_certify.endpoint import Ask, Hostile, Refusal, Reply, Subject
from llmserve_certify.examine import Examination, run_checks
from llmserve_certify.triton import TritonEndpoint
from tests.live.tutorials.configs import CONFIGS

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs/concepts/certify.md"
ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "iterative": {"max_tokens": 16, "ignore_eos": False},
    "ensemble": {"bad_words": "", "stop_words": ""},
}
"""What the tutorials' own clients always send."""
WORDS = {
    ("falcon", "no-foreign-text"): "text of another request",
    ("falcon", "prompts-are-answered"): "max_length",
    ("falcon", "refusals-hurt-nobody"): "a valid request is refused",
    ("iterative", "refusals-hurt-nobody"): "KeyError: 'max_tokens'",
    ("sequence", "repeatable"): "when the same is asked again",
    ("ensemble", "stop-words"): "the stop word",
}
"""What a failure has to say, where several faults could be its reason."""
ENSEMBLES = ("sequence", "ensemble")
_TRIES = {"sequence": 6, "falcon": 3}


def listed_faults() -> dict[str, set[str]]:
    """Return the checks that must fail for each model, by the page's table."""
    named: dict[str, set[str]] = {}
    page = PAGE.read_text(encoding="utf-8").partition("## The tutorials' own models")[2]
    for line in page.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and cells[0] in CONFIGS:
            named.setdefault(cells[0], set()).add(cells[2])
    return named


FAULTS = listed_faults()


@pytest.fixture(scope="module")
def served(triton: LiveTriton) -> Iterator[LiveTriton]:
    """Serve all of them; they are loaded at once, as most of the time is torch's."""
    for name, config in CONFIGS.items():
        folder = triton.repository / name
        (folder / "1").mkdir(parents=True)
        text = config.replace("FOLDER", str(demo_model_path()))
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")
        if (code := HERE / "models" / f"{name}.py").exists():
            shutil.copy(code, folder / "1/model.py")
    parts = [name for name in CONFIGS if name not in ENSEMBLES]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(triton.load, parts))
    triton.load(*ENSEMBLES)
    yield triton
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(triton.unload, ENSEMBLES))
        # The steps of ensembles go with them.
        steps = {part for name in ENSEMBLES for part in Model(triton.repository / name).parts}
        list(pool.map(triton.unload, [name for name in parts if name not in steps]))
    for name in CONFIGS:
        shutil.rmtree(triton.repository / name)


@pytest.fixture(scope="module")
def reference() -> Checkpoint:
    return Checkpoint("demo", demo_model_path(), {})


class Sequences:
    """The tutorial's client: it sends the whole text again for each token of an answer."""

    kind, model, task = "Triton", "sequence", "generate"
    chats = streams = False
    takes: frozenset[str] | None = frozenset({"max_tokens"})

    def __init__(self, triton: LiveTriton) -> None:
        self.url = self._url = triton.server.grpc_url
        self._numbers = itertools.count(1)

    def ask(self, ask: Ask) -> Reply:
        number, text = next(self._numbers), ask.prompt
        steps = int(ask.options["max_tokens"])
        with triton_grpc.InferenceServerClient(self._url) as client:
            for step in range(steps):
                place = {"sequence_start": step == 0, "sequence_end": step == steps - 1}
                text += self._next(client, text, number, place)
        return Reply(text[len(ask.prompt) :])

    def _next(self, client: Any, text: str, number: int, place: Mapping[str, bool]) -> str:
        tensor = triton_grpc.InferInput("INPUT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
        try:
            result = client.infer("sequence", [tensor], sequence_id=number, **place)
        except triton_grpc.InferenceServerException as error:
            raise Refusal(500, str(error)) from None
        piece: bytes = result.as_numpy("TEXT").flat[0]
        return piece.decode()

    def pieces(self, ask: Ask) -> Generator[str, None, None]:
        yield self.ask(ask).text

    def hostile(self) -> Sequence[Hostile]:
        return ()

    def send(self, hostile: Hostile) -> Reply | None:
        raise NotImplementedError

    def curl(self, ask: Ask) -> str:
        return ""

    def hostile_curl(self, hostile: Hostile) -> str:
        raise NotImplementedError

    def values(self, texts: Sequence[str]) -> list[Any]:
        raise NotImplementedError

    def values_curl(self, texts: Sequence[str]) -> str:
        raise NotImplementedError

    def decide(self, state: str, questions: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def decide_curl(self, state: str, questions: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        return {}


def endpoint_of(served: LiveTriton, model: str) -> Subject:
    if model == "sequence":
        return Sequences(served)
    return TritonEndpoint(served.client, model, always=ALWAYS.get(model))


@pytest.mark.parametrize("model", FAULTS)
def test_the_faults_of_a_tutorial_are_named(
    served: LiveTriton, reference: Checkpoint, model: str
) -> None:
    checks = [check for check in CHECKS if check.name in FAULTS[model]]
    # Tokens that are drawn by chance may be the same ones again, and requests may come into other
    # batches than those that are refused; and a token that is no UTF-8 fails its request.
    for _ in range(_TRIES.get(model, 1)):
        exam = Examination(endpoint_of(served, model), reference, quick=True)
        report = run_checks(exam, checks)
        missed = {
            verdict.name: (verdict.state, verdict.words)
            for verdict in report.verdicts
            if verdict.state != "failed"
            or WORDS.get((model, verdict.name), "") not in verdict.words
        }
        if not missed:
            break
    assert missed == {}
    assert len(report.verdicts) == len(FAULTS[model])


def test_the_page_lists_each_tutorial() -> None:
    assert FAULTS.keys() == {"iterative", "sequence", "llama_python", "ensemble", "falcon"}
