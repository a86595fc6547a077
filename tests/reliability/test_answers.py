"""A `serve --certify` whose model is damaged while it runs, and one that is only asked a lot."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import llmserve
from llmserve.plugin import demo_model_path
from llmserve.server import ask, find_servers
from llmserve.testing.command import run
from llmserve.testing.tiny_adapters import save_adapter
from tests.live.servers import Serving, eventually, fetch, figure

pytestmark = pytest.mark.long

# What happens in the process of the model, from the moment on that a file says so.
FAULTY = """
import os
from pathlib import Path

import torch
from llmserve.runtime.model import TritonPythonModel as TritonPythonModel
from llmserve_iterative.runner import FlatRunner

FAULTS = [Path(__file__).resolve().with_name(name) for name in ("fault", f"fault-{os.getpid()}")]
READ = Path(__file__).resolve().with_name("read")
healthy, last, damaged, stuck = FlatRunner.run, [None, None], [], []


@torch.inference_mode()
def run(self, chunks):
    fault = "".join(each.read_text() for each in FAULTS if each.exists())
    if fault == "weights" and not damaged:
        damaged.append(True)
        layers = [each for each in self._model.modules() if isinstance(each, torch.nn.Linear)]
        # The seven products of a layer.
        for weights in [each.weight for each in layers[7:14]]:
            weights.copy_(torch.randn_like(weights) * weights.std())
    if any(chunk.stop > 60 for chunk in chunks):
        # Only users' prompts are as long.
        with READ.open("a") as file:
            file.write(f"{os.getpid()}\\n")
    rows = healthy(self, chunks)
    if fault == "page":
        # The page of one sequence keeps what it has, whoever it is given to.
        stores = [each for pair in self._store._layers.values() for each in pair]
        if not stuck:
            first = chunks[0].pages[0] * self.page_size
            page = slice(first, first + self.page_size)
            stuck.append((page, [each[page].clone() for each in stores]))
        page, contents = stuck[0]
        for each, content in zip(stores, contents):
            each[page] = content
    late = all(chunk.single and chunk.start > 50 for chunk in chunks)
    if fault == "batch" and len(chunks) > 1 and late:
        # Each sequence of a batch gets what is the next token of another one, late in its answer:
        # the known ones end before.
        rows._rows = rows._rows.flip(0)
    last[:] = last[1], rows
    is_stale = fault == "again" and last[0] is not None and last[0]._rows.shape == rows._rows.shape
    return last[0] if is_stale else rows


FlatRunner.run = run
"""


def built(folder: Path, plugin: str, **options: Any) -> Path:
    llmserve.build(plugin, "demo", output=folder, **options)
    return folder


class Guarded(Serving):
    """A `serve --certify` whose faults are told to a command, which appends them to a file."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder, self.told = folder, folder.parent / "told"
        tell = f'{sys.executable} -c \'open("{self.told}", "a").write(input() + "\\n")\''
        self.log = folder.parent / "triton.log"
        told = ("--on-fault", tell, "--log", str(self.log))
        super().__init__(str(folder), "--certify", *told, *args)

    @property
    def answers(self) -> dict[str, Any]:
        """What the first model's report says of its answers."""
        (server,) = find_servers(repository=self.folder)
        model: dict[str, Any] = ask(server.socket, {"do": "status"}).to_json()["models"][0]
        # There is none before it has first been looked at.
        return {"fingerprint": model["fingerprint"], "known": 0, **model.get("certificate", {})}

    @property
    def faults(self) -> list[dict[str, Any]]:
        text = self.told.read_text() if self.told.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def ready(self, path: str = "readyz") -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://{self.frontend[0]}/{path}") as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.frontend[0]}/metrics") as response:
            lines = response.read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith(f'{name}{{model_name="demo"}}')]
        return float(line.split()[-1])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = built(tmp_path_factory.mktemp("served") / "repository", "iterative")
    (folder / "demo" / "1" / "model.py").write_text(FAULTY)
    running = Guarded(folder)
    yield running
    running.close()


def well(guarded: Guarded) -> None:
    """Wait until an answer was found right once more."""
    before = guarded.answers["checks"]
    eventually(lambda: guarded.answers["checks"] > before, 240)
    assert guarded.answers.get("fault") is None, guarded.output


def found(guarded: Guarded, before: int, began: float) -> dict[str, Any]:
    """Wait for a fault, and return it."""
    eventually(lambda: len(guarded.faults) > before, 240)
    content = guarded.faults[before]
    assert content["model"] == "demo"
    assert content["fault"] is not None
    figure(f"until {content['fault']['check']} was found to be wrong", time.monotonic() - began)
    return content


def recovered(guarded: Guarded, before: int) -> None:
    eventually(lambda: len(guarded.faults) > before + 1, 240)
    assert guarded.faults[before + 1]["fault"] is None
    assert guarded.answers.get("fault") is None


@pytest.mark.parametrize("fault", ["weights", "page", "again"])
def test_a_fault_of_the_engine_is_found(guarded: Guarded, fault: str) -> None:
    well(guarded)
    before, began = len(guarded.faults), time.monotonic()
    assert before % 2 == 0, guarded.faults
    switch = guarded.folder / "demo" / "1" / "fault"
    switch.write_text(fault)
    content = found(guarded, before, began)
    assert content["fault"]["check"] in ("answer", "log-probabilities")
    assert content["fault"]["off_by"] > content["fault"]["explained"]
    assert content["fingerprint"] == guarded.answers["fingerprint"]
    # The only one that could answer goes on, and says what is wrong.
    status, said = guarded.ready()
    assert status == 200
    assert "rounding explains" in said["models"]["demo"]["fault"]
    assert guarded.ready("readyz?certified")[0] == 503
    assert guarded.metric("llmserve_certify_fault") == 1
    assert "its answers are wrong" in run("status", "--repository", str(guarded.folder)).stdout
    guarded.wait_for("demo: its answers are wrong", after=began)
    switch.unlink()
    if fault == "weights":
        # They stay as they are in memory, until they are loaded again.
        asked = guarded.answers["checks"]
        eventually(lambda: guarded.answers["checks"] > asked + 1, 240)
        assert guarded.answers.get("fault") is not None
        run("reload", "demo", "--repository", str(guarded.folder))
    recovered(guarded, before)
    guarded.wait_for("demo: its answers are right again", after=began)
    assert guarded.metric("llmserve_certify_fault") == 0
    assert guarded.ready("readyz?certified")[0] == 200


def other_tokenizer(folder: Path) -> None:
    """Exchange the ids of words and their parts."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    pairs = [name for name in vocabulary if name.strip("\u0120").isalpha()]
    for one, other in zip(pairs[::2], pairs[1::2], strict=True):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def other_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("User: ", "Human: "))


@pytest.mark.parametrize(
    ("change", "checks"),
    [(other_tokenizer, ("prompt", "answer")), (other_template, ("template",))],
    ids=["tokenizer", "template"],
)
def test_other_files_after_a_reload_are_found(
    guarded: Guarded, change: Any, checks: tuple[str, ...], tmp_path: Path
) -> None:
    well(guarded)
    before, began = len(guarded.faults), time.monotonic()
    folder = guarded.folder / "demo" / "1" / "tokenizer"
    shutil.copytree(folder, tmp_path / "kept")
    change(folder)
    run("reload", "demo", "--repository", str(guarded.folder))
    assert found(guarded, before, began)["fault"]["check"] in checks
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)
    run("reload", "demo", "--repository", str(guarded.folder))
    recovered(guarded, before)


def two_adapters(folder: Path) -> str:
    """Write two adapters for the demo model; return how a build names them."""
    plain = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    for seed, name in enumerate(("one", "two")):
        save_adapter(folder / name, plain, targets=("c_attn", "c_fc"), seed=seed, rank=8)
    return f"one={folder / 'one'},two={folder / 'two'}"


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("iterative", {}),
        ("iterative", {"dtype": "bfloat16"}),
        ("openvino", {"weight_format": "int8"}),
    ],
    ids=["iterative", "iterative, bfloat16", "openvino, int8"],
)
def test_an_engine_that_is_well_has_no_fault_under_load(
    plugin: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """For a while, between requests, with adapters and without, that run in batches and share pages
    of the cache."""
    options = {**options, "adapters": two_adapters(tmp_path)}
    names = ("demo", "demo:one", "demo:two")
    guarded = Guarded(built(tmp_path / "repository", plugin, **options), "--certify-share", "1")
    try:
        until = time.monotonic() + 15

        def work(number: int) -> None:
            while time.monotonic() < until:
                prompt = f"Once upon a time {number}" if number % 2 else "Once upon a time"
                model = names[number % len(names)]
                ask_for(guarded, prompt, model=model, temperature=0.8 if number else 0.0)
                time.sleep(2.5 + number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: guarded.answers["judged"] >= 2, 240)
        assert guarded.answers["checks"] >= 2
        assert guarded.answers["faults"] == 0
        assert guarded.answers["unjudged"] == ""
        assert guarded.faults == []
    finally:
        guarded.close()


def ask_for(guarded: Guarded, prompt: str, **options: Any) -> Any:
    """Ask the gateway for an answer."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, **options}
    return fetch(f"http://{guarded.frontend[0]}/v1/completions", body)


def test_an_answer_to_a_user_that_was_wrong_is_found_without_a_word_of_it(tmp_path: Path) -> None:
    """A batch that mixes up its rows: the known answers, which are asked alone, do not show it."""
    folder = built(tmp_path / "repository", "iterative")
    (folder / "demo" / "1" / "model.py").write_text(FAULTY)
    guarded = Guarded(folder, "--certify-share", "1")
    try:
        eventually(lambda: guarded.answers["known"] > 0, 240)
        long = {"temperature": 0, "max_tokens": 90}
        alone = ask_for(guarded, "A secret of mine", **long)
        assert alone["choices"][0]["logprobs"] is None, "only its model is told its scores"
        eventually(lambda: guarded.answers["judged"] > 0, 240)
        assert guarded.answers["faults"] == 0
        (folder / "demo" / "1" / "fault").write_text("batch")
        began = time.monotonic()
        prompts = ["A secret of mine", "The evening was"]

        def is_mixed_up() -> bool:
            with ThreadPoolExecutor(2) as pool:
                both = list(pool.map(lambda each: ask_for(guarded, each, **long), prompts))
            return bool(both[0]["choices"][0]["text"] != alone["choices"][0]["text"])

        # They are only once they are computed together.
        eventually(is_mixed_up)
        content = found(guarded, 0, began)
        assert content["fault"]["check"] == "log-probabilities"
        assert content["fault"]["prompt"] == ""
        assert guarded.ready("readyz?certified")[0] == 503
        guarded.wait_for("of a user's answer", after=began)
        recovered(guarded, 0)
        said = guarded.told.read_text() + "".join(guarded.output) + guarded.log.read_text()
        assert "secret" not in said
    finally:
        guarded.close()


def test_a_replica_with_wrong_answers_gets_no_requests_until_they_are_right(
    tmp_path: Path,
) -> None:
    folder = built(tmp_path / "repository", "iterative")
    version = folder / "demo" / "1"
    (version / "model.py").write_text(FAULTY)
    guarded = Guarded(folder, "--replicas", "2")

    def ask_all(numbers: range) -> list[str]:
        """Ask all at once; return the answers."""
        prompts = [f"{number} " + "A model server is " * 20 for number in numbers]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda prompt: ask_for(guarded, prompt, temperature=0), prompts)
            return [answer["choices"][0]["text"] for answer in answers]

    def read_by() -> set[int]:
        """Return the processes that have read users' prompts since the last call."""
        path = version / "read"
        found = {int(line) for line in path.read_text().split()} if path.exists() else set()
        path.unlink(missing_ok=True)
        return found

    try:
        eventually(lambda: guarded.answers["known"] > 0, 120)
        both = set(guarded.processes("models/demo/1/model.py "))
        assert len(both) == 2
        right = ask_all(range(4))
        assert read_by() == both
        victim = min(both)
        switch = version / f"fault-{victim}"
        switch.write_text("again")
        content = found(guarded, 0, time.monotonic())
        assert content["replica"] in (1, 2)
        assert guarded.ready()[0] == 200
        assert guarded.ready("readyz?certified")[0] == 200
        assert guarded.metric("llmserve_certify_fault") == 1
        assert guarded.answers["faulty"] == 1
        eventually(lambda: (ask_all(range(10, 12)), read_by())[1] == both - {victim})
        # From then on, no user meets the faulty one.
        for _ in range(3):
            assert ask_all(range(4)) == right
            assert victim not in read_by()
        switch.unlink()
        recovered(guarded, 0)
        assert guarded.answers["faulty"] == 0
        assert guarded.metric("llmserve_certify_fault") == 0
        numbers = iter(range(100, 10_000, 4))

        def both_are_asked() -> bool:
            at = next(numbers)
            ask_all(range(at, at + 4))
            return read_by() == both

        eventually(both_are_asked)
    finally:
        guarded.close()
