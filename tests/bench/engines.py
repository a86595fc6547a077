"""All engines in turns in one run: through Triton, and what they are held against in process.

    python -m tests.bench.engines [--rounds 5] [--shape 92m] [--only generate,openvino]

The model has a known shape and random weights, and every prompt is a new one. A round asks every
way for 1, 8 and 32 answers at a time, in an order of its own, so that what else the machine does
falls on all of them. Anchors whose packages are not installed are left out, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationMixin

from llmserve.client import AsyncClient, connect_async
from llmserve.testing import LiveTriton

from .shapes import SHAPES, Prompts, make_model, save

TOKENS = 64
COUNTS = (1, 8, 32)
Ids = Sequence[list[int]]
Way = Callable[[Ids], float]
"""Answers prompts at the same time and returns the tokens a second."""

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "iterative": ("iterative", {}),
    "iterative continuous": ("iterative", {"batching": "continuous"}),
    "openvino": ("openvino", {"dtype": "float32"}),
    "openvino int8": ("openvino", {"dtype": "float32", "weight_format": "int8"}),
}


def timed(make: Callable[[Ids], int]) -> Way:
    """Return a way of something that makes tokens and says how many."""

    def rate(prompts: Ids) -> float:
        begun = time.perf_counter()
        made = make(prompts)
        seconds = time.perf_counter() - begun
        if made != len(prompts) * TOKENS:
            raise RuntimeError(f"{made} tokens came, not {len(prompts) * TOKENS}")
        return made / seconds

    return rate


def apart(
    make: Callable[..., Callable[[Ids], int]], *arguments: object
) -> Callable[[], Callable[[Ids], int]]:
    """Return what starts a process with nothing in it but what answers there.

    Where several compute in one process, each from a thread of its own, all of them are slower.
    """

    def start() -> Callable[[Ids], int]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=_answer, args=(theirs, make, arguments), daemon=True).start()
        theirs.close()

        def ask(prompts: Ids) -> int:
            ours.send(prompts)
            return int(ours.recv())

        return ask

    return start


def _answer(pipe: Any, make: Callable[..., Callable[[Ids], int]], arguments: Any) -> None:
    answer = make(*arguments)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(answer(pipe.recv()))


def with_model(answer: Callable[[Any, Ids], int], *of: str) -> Callable[[Ids], int]:
    return partial(answer, make_model(*of))


def generate(model: Any, prompts: Ids) -> int:
    """Answer with transformers' own loop, all prompts in one batch."""
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
        )
    return int(answer[:, ids.shape[1] :].numel())


def generate_batch(model: Any, prompts: Ids) -> int:
    """Answer with transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # By itself it takes most of the memory for its cache, anew for each call.
    room = ContinuousBatchingConfig(num_blocks=2 * max(COUNTS), max_batch_tokens=1024)
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, **ends)
    found = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=room,
        progress_bar=False,
    )
    return sum(len(answer.generated_tokens) for answer in found.values())


def iterative(*model: str) -> Callable[[Ids], int]:
    """Answer with the engine of ``iterative``, without Triton and its driver."""
    from llmserve.runtime import Generation, Params
    from llmserve.testing.fake import ByteTokenizer
    from llmserve_iterative.engine.engine import Engine

    engine = Engine(
        make_model(*model),
        ByteTokenizer(),
        max_sequences=max(COUNTS),
        cache_tokens=256 * max(COUNTS),
    )

    def make(prompts: Ids) -> int:
        generations = [
            Generation(ids, Params(), max_tokens=TOKENS, eos_ids=frozenset(), decode=lambda _: "")
            for ids in prompts
        ]
        for generation in generations:
            engine.admit(generation)
        while engine.busy:
            engine.step()
        return sum(len(generation.token_ids) for generation in generations)

    return make


def openvino_genai(folder: Path) -> Callable[[Ids], int]:
    """Answer with OpenVINO GenAI by itself, on a model as a build converted it."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder / "1" / "openvino"), genai.SchedulerConfig(), "CPU", exact
    )
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = TOKENS, True
    config.set_eos_token_id(0)

    def make(prompts: Ids) -> int:
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        found = pipeline.generate(tensors, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in found)

    return make


def ctranslate2(checkpoint: Path, folder: Path) -> Callable[[Ids], int]:
    """Answer with CTranslate2 and int8 weights."""
    ct2 = import_module("ctranslate2")
    made = ct2.converters.TransformersConverter(str(checkpoint))
    made.convert(str(folder / "ct2"), quantization="int8")
    generator = ct2.Generator(str(folder / "ct2"), compute_type="int8")

    def make(prompts: Ids) -> int:
        found = generator.generate_batch(
            [[f"w{token}" for token in ids] for ids in prompts],
            max_length=TOKENS,
            min_length=TOKENS,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return sum(len(answer.sequences_ids[0]) for answer in found)

    return make


async def connected(url: str) -> AsyncClient:
    return connect_async(url, timeout=600)


def served(
    loop: asyncio.AbstractEventLoop, client: AsyncClient, build: Callable[[], str], *, stream: bool
) -> Callable[[Ids], int]:
    """Answer through Triton, by a client that is connected already."""
    model = build()
    asked: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}

    async def one(prompt: str) -> int:
        if not stream:
            return (await client.generate(model, prompt, **asked)).output_tokens or 0
        count = 0
        async for piece in client.stream(model, prompt, **asked):
            count = piece.output_tokens or count
        return count

    async def ask(prompts: Ids) -> int:
        return sum(await asyncio.gather(*(one(Prompts.text(ids)) for ids in prompts)))

    return lambda prompts: loop.run_until_complete(ask(prompts))


@contextmanager
def ways(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Way]]:
    """Start everything that is to be measured."""
    wanted = args.only.split(",") if args.only else ()
    found: dict[str, Way] = {}

    def add(name: str, make: Callable[[], Callable[[Ids], int]], *packages: str) -> None:
        if wanted and not any(word in name for word in wanted):
            return
        if missing := [package for package in packages if find_spec(package) is None]:
            console.print(f"{name} is left out: {missing[0]} is not installed")
            return
        console.print(f"making {name}", style="dim")
        found[name] = timed(make())

    with tempfile.TemporaryDirectory() as home, closing(asyncio.new_event_loop()) as loop:
        folder = Path(home)
        checkpoint = save(args.shape, args.device, folder / "model")
        model = (args.shape, args.dtype, args.device)
        add("generate(), in process", apart(with_model, generate, *model))
        add("iterative's engine, in process", apart(iterative, *model))
        if hasattr(GenerationMixin, "generate_batch"):
            add("generate_batch(), in process", apart(with_model, generate_batch, *model))
        add("CTranslate2 int8, in process", apart(ctranslate2, checkpoint, folder), "ctranslate2")
        with LiveTriton.start(folder / "repository") as live:
            client = loop.run_until_complete(connected(live.server.grpc_url))
            common = {"dtype": args.dtype, "device": args.device}
            builds = {
                label: cache(partial(live.build, plugin, str(checkpoint), **{**common, **options}))
                for label, (plugin, options) in SERVED.items()
                if plugin != "openvino" or args.device == "cpu"
            }
            for label, build in builds.items():
                for stream in (False, True):
                    name = f"{label}, {'streaming' if stream else 'whole'}"
                    add(name, partial(served, loop, client, build, stream=stream))
            if args.device == "cpu":
                add(
                    "OpenVINO GenAI, in process",
                    lambda: apart(openvino_genai, live.repository / builds["openvino"]())(),
                    "openvino_genai",
                )
            yield found
            loop.run_until_complete(client.close())


def measure(
    found: dict[str, Way], rounds: int, console: Console
) -> dict[str, dict[int, list[float]]]:
    """Return the rates of every way by how many were asked at a time."""
    prompts = Prompts()
    for name, way in list(found.items()):
        try:
            way(prompts.ids(2))
        except Exception as error:
            # OpenVINO's int8 may not run on a processor with AVX-512 that is held to AVX2.
            console.print(f"{name} is left out: {str(error) or 'its process has ended'}")
            del found[name]
    rates: dict[str, dict[int, list[float]]] = {name: {n: [] for n in COUNTS} for name in found}
    for turn in range(rounds):
        for count in COUNTS:
            for name in random.Random(turn).sample(list(found), len(found)):
                rates[name][count].append(found[name](prompts.ids(count)))
        console.print(f"round {turn + 1} of {rounds}", style="dim")
    return rates


def caption() -> str:
    """Say what the figures hold for."""
    get = getattr(torch.cpu, "get_capabilities", dict)
    has = " ".join(sorted(name for name, is_there in get().items() if is_there is True))
    limits = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
    set_here = [f"{name}={os.environ[name]}" for name in limits if name in os.environ]
    return "; ".join(
        [
            f"{platform.machine()}, {torch.get_num_threads()} threads: {has}",
            *set_here,
            f"torch {torch.__version__}, transformers {version('transformers')}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="92m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="Words of the ways to measure, with commas between them.")
    args = parser.parse_args()
    console = Console(stderr=True, width=120)
    with ways(args, console) as found:
        rates = measure(found, args.rounds, console)
    title = f"tokens/s, {TOKENS} each; {args.shape}, {args.dtype}, {args.device}; medians (range)"
    table = Table("", *(f"{count} at a time" for count in COUNTS), title=title, caption=caption())
    for name, by_count in rates.items():
        cells = (f"{median(r):.0f} ({min(r):.0f} to {max(r):.0f})" for r in by_count.values())
        table.add_row(name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
