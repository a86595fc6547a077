"""All engines in one run: through Triton, and their reference points in process.

    python -m plugins.tools.bench.engines [--rounds 5] [--shape 92m] [--only "generate();openvino"]

The model has a known shape and random weights, and no prompt is used twice. Each round measures all
engines with 1, 8 and 32 concurrent prompts, in a random order, so that other load on the machine
affects all of them. An engine whose packages are not installed is skipped with a message. Of
streams there is a second table: how many tokens a chunk has, and the gap between two chunks.
``TOKENS=32`` before the command makes answers shorter.
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
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationMixin

from llmserve.client import AsyncClient, connect_async
from llmserve.testing import LiveTriton

from .shapes import SHAPES, Prompts, make_model, save

TOKENS = int(os.environ.get("TOKENS", "64"))
"""How many each answer has; fewer save time where a model is large."""
COUNTS = (1, 8, 32)
Ids = Sequence[list[int]]
Answer = Callable[[Ids], int]
"""Answers prompts concurrently and returns the number of tokens."""
Rate = Callable[[Ids], float]
"""Answers prompts concurrently and returns tokens per second."""

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "iterative": ("iterative", {}),
    "iterative continuous": ("iterative", {"batching": "continuous"}),
    "openvino": ("openvino", {"dtype": "float32"}),
    "openvino int8": ("openvino", {"dtype": "float32", "weight_format": "int8"}),
}


def timed(answer: Answer) -> Rate:
    def rate(prompts: Ids) -> float:
        started = time.perf_counter()
        tokens = answer(prompts)
        seconds = time.perf_counter() - started
        if tokens != len(prompts) * TOKENS:
            raise RuntimeError(f"{tokens} tokens instead of {len(prompts) * TOKENS}")
        return tokens / seconds

    return rate


def worker(make: Callable[..., Answer], *arguments: object) -> Callable[[], Answer]:
    """Return a function that starts a separate process for this engine.

    If several engines compute in one process, each in its own thread, all of them are slower.
    """

    def start() -> Answer:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, make, arguments), daemon=True).start()
        theirs.close()

        def ask(prompts: Ids) -> int:
            ours.send(prompts)
            return int(ours.recv())

        return ask

    return start


def _serve(pipe: Any, make: Callable[..., Answer], arguments: Any) -> None:
    answer = make(*arguments)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(answer(pipe.recv()))


def with_model(answer: Callable[[Any, Ids], int], *model: str) -> Answer:
    return partial(answer, make_model(*model))


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

    # By default it allocates most of the memory for its cache, in every call.
    cache_config = ContinuousBatchingConfig(num_blocks=2 * max(COUNTS), max_batch_tokens=1024)
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, **ends)
    answers = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=cache_config,
        progress_bar=False,
    )
    return sum(len(answer.generated_tokens) for answer in answers.values())


def iterative(*model: str) -> Answer:
    """Answer with the engine of ``iterative``, without Triton and without its driver."""
    from llmserve.runtime import Engine, Generation, Params
    from llmserve.testing.fake import ByteTokenizer
    from llmserve_iterative.runner import make_runner

    engine = Engine(
        make_runner(make_model(*model), 256 * max(COUNTS)),
        ByteTokenizer(),
        max_sequences=max(COUNTS),
    )

    def answer(prompts: Ids) -> int:
        generations = [
            Generation(ids, Params(), max_tokens=TOKENS, eos_ids=frozenset(), decode=lambda _: "")
            for ids in prompts
        ]
        for generation in generations:
            engine.admit(generation)
        while engine.busy:
            engine.step()
        return sum(len(generation.token_ids) for generation in generations)

    return answer


def openvino_genai(folder: Path) -> Answer:
    """Answer with OpenVINO GenAI alone, using the model that a build converted."""
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

    def answer(prompts: Ids) -> int:
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipeline.generate(tensors, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)

    return answer


def genai_of(live: LiveTriton, build: Callable[[], str]) -> Answer:
    return worker(openvino_genai, live.repository / build())()


def ctranslate2(checkpoint: Path, folder: Path) -> Answer:
    """Answer with CTranslate2 and int8 weights."""
    ct2 = import_module("ctranslate2")
    converter = ct2.converters.TransformersConverter(str(checkpoint))
    converter.convert(str(folder / "ct2"), quantization="int8")
    generator = ct2.Generator(str(folder / "ct2"), compute_type="int8")

    def answer(prompts: Ids) -> int:
        answers = generator.generate_batch(
            [[f"w{token}" for token in ids] for ids in prompts],
            max_length=TOKENS,
            min_length=TOKENS,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return sum(len(answer.sequences_ids[0]) for answer in answers)

    return answer


async def connected(url: str) -> AsyncClient:
    return connect_async(url, timeout=600)


@dataclass
class Chunks:
    """How streams arrived: how many tokens, in how many chunks, how many seconds after another."""

    tokens: int = 0
    chunks: int = 0
    gaps: list[float] = field(default_factory=list)

    def cell(self) -> str:
        middle, late = (1e3 * float(np.quantile(self.gaps, share)) for share in (0.5, 0.95))
        return f"{self.tokens / self.chunks:.1f}; {middle:.0f} / {late:.0f}"


Paces = dict[int, Chunks]
"""The chunks of an engine's streams, by the number of concurrent prompts."""


def served(
    loop: asyncio.AbstractEventLoop,
    client: AsyncClient,
    build: Callable[[], str],
    paces: Paces | None = None,
) -> Answer:
    """Answer through Triton, with a client that is already connected; stream if paces are kept."""
    model = build()
    options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}

    async def whole(prompt: str) -> int:
        return (await client.generate(model, prompt, **options)).output_tokens or 0

    async def stream(prompt: str, chunks: Chunks) -> int:
        count, last = 0, None
        async for piece in client.stream(model, prompt, **options):
            count = piece.output_tokens or count
            now = time.perf_counter()
            if last is not None:
                chunks.gaps.append(now - last)
            last = now
            chunks.chunks += 1
        chunks.tokens += count
        return count

    async def answer_all(prompts: Ids) -> int:
        texts = [Prompts.text(ids) for ids in prompts]
        if paces is None:
            return sum(await asyncio.gather(*map(whole, texts)))
        chunks = paces.setdefault(len(texts), Chunks())
        return sum(await asyncio.gather(*(stream(text, chunks) for text in texts)))

    return lambda prompts: loop.run_until_complete(answer_all(prompts))


@contextmanager
def start_engines(
    args: argparse.Namespace, paces: dict[str, Paces], console: Console
) -> Iterator[dict[str, Rate]]:
    """Start all engines to be measured; ``paces`` gets how the streams of each arrive."""
    words = args.only.split(";") if args.only else ()
    started: dict[str, Rate] = {}

    def add(name: str, start: Callable[[], Answer], *packages: str) -> None:
        if words and not any(word in name for word in words):
            return
        if missing := [package for package in packages if find_spec(package) is None]:
            console.print(f"skipping {name}: {missing[0]} is not installed")
            return
        console.print(f"starting {name}", style="dim")
        started[name] = timed(start())

    with tempfile.TemporaryDirectory() as home, closing(asyncio.new_event_loop()) as loop:
        folder = Path(home)
        checkpoint = save(args.shape, args.device, folder / "model")
        model = (args.shape, args.dtype, args.device)
        add("generate(), in process", worker(with_model, generate, *model))
        add("iterative's engine, in process", worker(iterative, *model))
        if hasattr(GenerationMixin, "generate_batch"):
            add("generate_batch(), in process", worker(with_model, generate_batch, *model))
        add("CTranslate2 int8, in process", worker(ctranslate2, checkpoint, folder), "ctranslate2")
        with LiveTriton.start(folder / "repository") as live:
            client = loop.run_until_complete(connected(live.server.grpc_url))
            common = {"dtype": args.dtype, "device": args.device}
            builds = {
                label: cache(partial(live.build, plugin, str(checkpoint), **{**common, **options}))
                for label, (plugin, options) in SERVED.items()
                if plugin != "openvino" or args.device == "cpu"
            }
            for label, build in builds.items():
                add(f"{label}, whole", partial(served, loop, client, build))
                streaming = f"{label}, streaming"
                kept = paces.setdefault(streaming, {})
                add(streaming, partial(served, loop, client, build, kept))
            if args.device == "cpu":
                for label in ("openvino", "openvino int8"):
                    name = label.replace("openvino", "OpenVINO GenAI")
                    add(
                        f"{name}, in process",
                        partial(genai_of, live, builds[label]),
                        "openvino_genai",
                    )
            yield started
            loop.run_until_complete(client.close())


def measure(
    engines: dict[str, Rate], rounds: int, console: Console
) -> dict[str, dict[int, list[float]]]:
    """Return the rates of every engine for each number of concurrent prompts."""
    prompts = Prompts()
    for name, rate in list(engines.items()):
        try:
            rate(prompts.ids(2))
        except Exception as error:
            # OpenVINO's int8 may not run on a processor with AVX-512 that is restricted to AVX2.
            console.print(f"skipping {name}: {str(error) or 'its process has ended'}")
            del engines[name]
    rates: dict[str, dict[int, list[float]]] = {name: {n: [] for n in COUNTS} for name in engines}
    for turn in range(rounds):
        for count in COUNTS:
            for name in random.Random(turn).sample(list(engines), len(engines)):
                rates[name][count].append(engines[name](prompts.ids(count)))
        console.print(f"round {turn + 1} of {rounds}", style="dim")
    return rates


def caption() -> str:
    """Describe the machine and the settings of this run."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    features = " ".join(sorted(name for name, value in capabilities.items() if value is True))
    limits = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
    set_limits = [f"{name}={os.environ[name]}" for name in limits if name in os.environ]
    return "; ".join(
        [
            f"{platform.machine()}, {torch.get_num_threads()} threads: {features}",
            *set_limits,
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
    parser.add_argument("--only", help="Parts of names that select engines, with ; between them.")
    args = parser.parse_args()
    console = Console(stderr=True, width=120)
    paces: dict[str, Paces] = {}
    with start_engines(args, paces, console) as engines:
        rates = measure(engines, args.rounds, console)
    title = f"tokens/s, {TOKENS} each; {args.shape}, {args.dtype}, {args.device}; medians (range)"
    table = Table("", *(f"{count} concurrent" for count in COUNTS), title=title, caption=caption())
    for name, by_count in rates.items():
        cells = (f"{median(r):.0f} ({min(r):.0f} to {max(r):.0f})" for r in by_count.values())
        table.add_row(name, *cells)
    arrivals = Table(
        "",
        *(f"{count} streams" for count in COUNTS),
        title="tokens per chunk; gap between two chunks, ms: median / 95th percentile",
    )
    for name, pace in paces.items():
        if rates.get(name):
            arrivals.add_row(name, *(pace[count].cell() for count in COUNTS))
    Console(width=120).print(table, arrivals)


if __name__ == "__main__":
    main()
