"""Ours beside vLLM on the CPU and llama.cpp: a real chat model, the same requests, in turns.

    python -m plugins.tools.bench.peers [--rounds 3] [--only openvino,vllm] [--beside 2]
        [--adapters 8]

The model is that of the tests (`make real-model`). Ours are measured through the gateway, vLLM and
llama.cpp through their own servers, all as OpenAI endpoints. llama.cpp and "openvino kept" compute
with the weights as they are in the file (Q4_1), the others with the same ones widened. With
--beside, so many processes compute meanwhile. With --adapters, each but llama.cpp is served once
more with so many random adapters of rank 16, which requests name in turn. Environments of the peers
are made in build. A peer that cannot be had here is named with its reason, and left out. Run by
build/vllm/bin/python, it compares vLLM in Triton with vLLM's own server.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from llmserve.errors import LLMServeError
from llmserve.testing import LiveTriton
from llmserve.testing.tiny_adapters import save_adapter
from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan
from llmserve_bench.prompts import Prompts
from llmserve_bench.results import Load
from llmserve_bench.targets import Target
from tests import llama_environment
from tests.real.model import NotHad, converted_model, real_model
from tests.support import ROOT
from tests.vllm_environment import VLLM, NotMade, vllm_environment

from .gateway import FIRST, RATE, STREAMS, cell, gateway
from .gateway import run as run_load

ENVIRONMENTS = ROOT / "build" / "peers"
MODEL = "real"


@dataclass(frozen=True)
class Own:
    """One of ours: its plugin and options, and whether it gets the file as it is."""

    plugin: str
    options: Mapping[str, str] = field(default_factory=dict)
    is_kept: bool = False


@dataclass(frozen=True)
class Measured:
    """What gets the requests, and the adapters that they name in turn."""

    target: Target
    adapters: tuple[str, ...] = ()


Adapters = Mapping[str, Path]

OURS: Mapping[str, Own] = {
    "openvino": Own("openvino"),
    "openvino int8": Own("openvino", {"weight_format": "int8"}),
    "openvino kept": Own("openvino", is_kept=True),
    "iterative": Own("iterative"),
    # Only in the environment of `make test-vllm`; the others only outside it.
    "vllm in Triton": Own("vllm"),
}
_START = 300.0
_RANK = 16
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PAUSE = 2.0
"""Seconds between two targets: vLLM computes on for one after its last answer."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(words: Sequence[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """Run a server until the end of the block; yield its address once it has the model."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            # As ours: Linux divides processors among sessions, and gave nearly all to one in which
            # others computed and a vLLM waited.
            start_new_session=True,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/models", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if process.poll() is not None:
            raise NotHad(f"its server ended with status {process.returncode}, see {log}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise NotHad(f"its server did not answer within {_START:.0f} s, see {log}")


@contextmanager
def vllm(folder: Path, dtype: str = "bfloat16", *more: str) -> Iterator[str]:
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    program, port = vllm_environment() / "bin" / "vllm", free_port()
    words = [
        str(program),
        "serve",
        str(folder),
        "--served-model-name",
        MODEL,
        "--dtype",
        dtype,
        # By default, it takes nearly all of a machine's memory.
        "--gpu-memory-utilization",
        "0.25",
        *more,
    ]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    log = ENVIRONMENTS / "vllm.log"
    with server(words, port, log, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1") as address:
        yield address


@contextmanager
def llama(file: Path) -> Iterator[str]:
    words, port = llama_environment.llama_server(), free_port()
    words += llama_environment.options(file, MODEL, port, max(STREAMS), os.cpu_count() or 1)
    with server(words, port, ENVIRONMENTS / "llama.log") as address:
        yield address


@contextmanager
def computing(count: int) -> Iterator[None]:
    """Have so many processes compute until the end of the block."""
    words = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(words) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


@contextmanager
def random_adapters(folder: Path, count: int) -> Iterator[Adapters]:
    """Write so many adapters for the products of the model's attention."""
    with tempfile.TemporaryDirectory() as home:
        if count:
            model = AutoModelForCausalLM.from_pretrained(folder)
        yield {
            name: save_adapter(Path(home, name), model, targets=_PRODUCTS, seed=seed, rank=_RANK)
            for seed, name in enumerate(f"adapter{n}" for n in range(count))
        }


@contextmanager
def ours(
    folder: Path, file: Path, engines: Sequence[str], adapters: Adapters
) -> Iterator[dict[str, Measured]]:
    """Serve the model by these engines, behind one gateway."""
    with tempfile.TemporaryDirectory() as home, LiveTriton.start(Path(home) / "models") as live:
        models: dict[str, tuple[str, tuple[str, ...]]] = {}
        named = ",".join(f"{name}={path}" for name, path in adapters.items())
        for name in engines:
            own = OURS[name]
            source = str(file if own.is_kept else folder)
            models[name] = live.build(own.plugin, source, **own.options), ()
            if adapters:
                model = live.build(own.plugin, source, **own.options, adapters=named)
                models[_with(name, adapters)] = model, tuple(adapters)
        with gateway(live.server.grpc_url) as (address, _):
            yield {
                name: Measured(Target(model, address, tokenizer=folder, api="completions"), names)
                for name, (model, names) in models.items()
            }


def targets_of(
    stack: ExitStack, chosen: Sequence[str], count: int, console: Console
) -> dict[str, Measured]:
    """Start all that is to be measured; say of a peer that it cannot be had, and why."""
    folder, file = converted_model(), real_model()
    adapters = stack.enter_context(random_adapters(folder, count))
    own = [name for name in OURS if name in chosen]
    targets = stack.enter_context(ours(folder, file, own, adapters))
    starts: dict[str, tuple[Callable[[], AbstractContextManager[str]], tuple[str, ...]]] = {}
    if "vllm" in chosen:
        starts["vllm"] = partial(vllm, folder), ()
        if adapters:
            with_them = partial(vllm, folder, "bfloat16", *lora_options(adapters))
            starts[_with("vllm", adapters)] = with_them, tuple(adapters)
    if "llama.cpp" in chosen:
        starts["llama.cpp"] = partial(llama, file), ()
    for name, (start, names) in starts.items():
        console.print(f"starting {name}", style="dim")
        try:
            address = stack.enter_context(start())
        except (NotHad, NotMade) as error:
            console.print(f"{name} cannot be had: {error}", style="yellow")
        else:
            target = Target(MODEL, address, tokenizer=folder, api="completions")
            targets[name] = Measured(target, names)
    return targets


def lora_options(adapters: Adapters) -> list[str]:
    """Return vLLM's options for adapters by the names that ours have in OpenAI's API."""
    modules = [f"{MODEL}:{name}={path}" for name, path in adapters.items()]
    limits = ["--max-lora-rank", str(_RANK), "--max-loras", str(len(adapters))]
    return ["--enable-lora", *limits, "--lora-modules", *modules]


def _with(name: str, adapters: Adapters) -> str:
    return f"{name}, {len(adapters)} adapters"


def asked(load: Load, adapters: tuple[str, ...]) -> Load:
    """Ask for what ours do by default: others take the likeliest token only on request."""
    return replace(load, options={**load.options, "temperature": 0}, adapters=adapters)


def figures(measured: Measured, plan: Plan) -> Iterator[tuple[str, float]]:
    """Yield the columns of the table with what is measured now."""
    target, adapters = measured.target, measured.adapters
    first = figures_of(run_load(target, asked(FIRST, adapters), plan), FIRST)
    for count, load in STREAMS.items():
        found = figures_of(run_load(target, asked(load, adapters), plan), load)
        yield f"tokens/s x {count}", found[RATE]
        yield (
            f"first token x {count}, ms",
            (first if count == 1 else found).get("ttft_p50", math.nan) * 1e3,
        )


def measure(
    targets: dict[str, Measured], rounds: int, console: Console
) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each target by column, a value for each round that it was whole in.

    A target that fails is left out of the rounds that follow; Ctrl-C leaves out rounds.
    """
    plan = Plan(Prompts())
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    for turn in range(rounds):
        began = time.monotonic()
        try:
            found = one_round(targets, turn, plan, console)
        except KeyboardInterrupt:
            break
        for name, columns in found.items():
            for column, value in columns.items():
                measured[name].setdefault(column, []).append(value)
        took = f"{time.monotonic() - began:.0f} s"
        console.print(f"round {turn + 1} of {rounds}, {took}", style="dim")
    return {name: found for name, found in measured.items() if found}


def one_round(
    targets: dict[str, Measured], turn: int, plan: Plan, console: Console
) -> dict[str, dict[str, float]]:
    found = {}
    for name in random.Random(turn).sample(list(targets), len(targets)):
        try:
            found[name] = dict(figures(targets[name], plan))
        except (LLMServeError, RuntimeError) as error:
            console.print(f"{name} is left out from now on: {error}", style="yellow")
            del targets[name]
        time.sleep(_PAUSE)
    return found


def choices() -> list[str]:
    """Return what can be measured in this environment: vLLM has one of its own."""
    ours = (
        ["vllm in Triton"] if find_spec("vllm") else [n for n in OURS if OURS[n].plugin != "vllm"]
    )
    return [*ours, "vllm", *([] if find_spec("vllm") else ["llama.cpp"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--adapters", type=int, default=0, metavar="COUNT")
    parser.add_argument("--only", default=",".join(choices()))
    args = parser.parse_args()
    console = Console(stderr=True)
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            targets = targets_of(stack, args.only.split(","), args.adapters, console)
        except NotHad as error:
            sys.exit(f"The real model cannot be had: {error}")
        stack.enter_context(computing(args.beside))
        measured = measure(targets, args.rounds, console)
    if not measured:
        sys.exit("Nothing could be measured.")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    caption = f"{platform.machine()}, {os.cpu_count()} cores, load at the end {load}"
    titles = {"vllm": f"vLLM {VLLM}", "llama.cpp": llama_environment.title()}
    title = f"{real_model().stem}, streams of 64 tokens, medians of {args.rounds} rounds (range)"
    columns = next(iter(measured.values()))
    table = Table("", *columns, title=title, caption=caption)
    for name, found in measured.items():
        program, comma, rest = name.partition(",")
        cells = (cell(values, 0) for values in found.values())
        table.add_row(f"{titles.get(program, program)}{comma}{rest}", *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
