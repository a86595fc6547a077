"""What it costs to constrain answers.

    python -m plugins.tools.bench.forms [ROUNDS] [--real PLUGIN]

128,000 tokens, random weights. Runs of 32 answers of `iterative`'s engine, free and constrained,
alternate; on a busy machine, processor time is more reliable than wall time.

With `--real openvino` (or iterative), the real model answers under every schema of the tests, 32 at
a time, and each answer is judged; then the same runs alternate with it.
"""

import argparse
import json
import tempfile
from collections import Counter
from contextlib import suppress
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

import llmserve
from llmserve.runtime import Engine, Generation, RequestError, TextFormatter, read_params
from llmserve_iterative.runner import make_runner
from tests.real.model import converted_model
from tests.support import ROOT

SIZE, STREAMS, TOKENS = 128_000, 32, 48
SCHEMAS = json.loads((ROOT / "tests/unit/runtime/schemas.json").read_text("utf-8"))
FORMATTER = TextFormatter({}, Path())


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes and all prefixes of invented words."""
    syllables = [a + b for a, b in product("bcdfghjklmnprstvw", "aeiou")]
    words = ("".join(parts) for n in (1, 2, 3) for parts in product(syllables, repeat=n))
    prefixes = (f"{space}{word[:n]}" for word in words for n in range(1, 7) for space in ("", "Ġ"))
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *prefixes])
    ids = {token: number for number, token in enumerate([*tokens][: SIZE - 1])}
    merges = [(token[:-1], token[-1]) for token in ids if len(token) > 1]
    bpe = Tokenizer(models.BPE(ids, merges))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    bpe.add_special_tokens(["</s>"])
    eos = frozenset({SIZE - 1})
    return SimpleNamespace(eos_ids=eos, tokenizer_json=bpe.to_str, decode=bpe.decode)


def new_generation(tokenizer: Any, schema: Any, *, max_tokens: int = TOKENS) -> Generation:
    free = {"ignore_eos": True}
    params = read_params(free if schema is None else {"json_schema": json.dumps(schema)})
    ends, decode = tokenizer.eos_ids, tokenizer.decode
    generation = Generation([5, 6, 7], params, max_tokens=max_tokens, eos_ids=ends, decode=decode)
    generation.constraint = FORMATTER.constrain(generation, tokenizer)
    return generation


def report(what: str, values: list[float]) -> None:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    print(f"{what}: {middle:.3g} ({low:.3g} to {high:.3g}, n={len(values)})", flush=True)


def costs(tokenizer: Any) -> None:
    compiled, masked = [], []
    scores = np.random.default_rng(0).normal(size=(TOKENS, SIZE))
    for schema in chain(*SCHEMAS.values()):
        started = process_time()
        with suppress(RequestError):
            generation = new_generation(tokenizer, schema)
            compiled.append((process_time() - started) * 1e3)
            while not generation.done:
                row = scores[len(generation.token_ids)].copy()
                started = process_time()
                generation.constrain(row)
                masked.append((process_time() - started) * 1e3)
                generation.push(int(row.argmax()))
    report("ms to compile a schema", compiled[1:])
    report("ms to mask a token", masked)


def small_engine(tokenizer: Any) -> Engine:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=SIZE)).eval()
    return Engine(make_runner(model, STREAMS * 128), tokenizer, max_sequences=STREAMS)


def real_engine(plugin: str, folder: Path) -> tuple[Engine, Any]:
    """Build the real model, and return its engine and its tokenizer."""
    built = llmserve.build(plugin, str(converted_model()), output=folder, dtype="float32")

    def component(role: str) -> Any:
        stated = built.manifest.components[role]
        module, _, name = stated["runtime"].partition(":")
        return getattr(import_module(module), name)(stated["settings"], built.folder / "1")

    tokenizer, generator = component("tokenizer"), component("generator")
    engine: Engine = generator.stepper(tokenizer)
    eos_ids = frozenset(generator.eos_ids)
    whole = SimpleNamespace(
        eos_ids=eos_ids, tokenizer_json=tokenizer.tokenizer_json, decode=tokenizer.decode
    )
    return engine, whole


def run(engine: Engine, generations: list[Generation]) -> dict[Generation, Exception]:
    """Run them to their end, and return the errors of those that failed."""
    errors: dict[Generation, Exception] = {}
    for generation in generations:
        engine.admit(generation)
    while engine.busy:
        errors.update(engine.step().failed)
    return errors


def judge(engine: Engine, tokenizer: Any) -> None:
    """Print what became of an answer under each schema."""
    counts = Counter[str]()
    schemas = [*chain(*SCHEMAS.values())]
    for first in range(0, len(schemas), STREAMS):
        some = []
        for schema in schemas[first : first + STREAMS]:
            try:
                some.append((schema, new_generation(tokenizer, schema, max_tokens=120)))
            except RequestError as error:
                counts["refused when it was read"] += 1
                print("refused:", json.dumps(schema), error)
        errors = run(engine, [generation for _, generation in some])
        for schema, generation in some:
            verdict = verdict_on(schema, generation, errors.get(generation), tokenizer)
            counts[verdict] += 1
            if verdict in ("wrong", "failed"):
                print(
                    verdict,
                    json.dumps(schema),
                    tokenizer.decode(generation.token_ids),
                    errors.get(generation),
                )
    print(dict(counts), flush=True)


def verdict_on(schema: Any, generation: Generation, error: Any, tokenizer: Any) -> str:
    if error is not None:
        is_early = isinstance(error, RequestError) and not generation.token_ids
        return "refused before the first token" if is_early else "failed"
    if generation.finish_reason == "length":
        return "cut at max_tokens"
    text = tokenizer.decode([i for i in generation.token_ids if i not in tokenizer.eos_ids])
    try:
        jsonschema.validate(json.loads(text), schema)
    except jsonschema.SchemaError:
        return "ended (the schema itself is not valid)"
    except (ValueError, jsonschema.ValidationError):
        return "wrong"
    return "valid"


def throughput(engine: Engine, tokenizer: Any, rounds: int) -> None:
    schema = {"type": "array", "items": SCHEMAS["documents"][0], "minItems": 9}
    durations = []
    for constraint in (None, schema) * (rounds + 1):
        generations = [new_generation(tokenizer, constraint) for _ in range(STREAMS)]
        started = np.array([perf_counter(), process_time()])
        if run(engine, generations):
            raise SystemExit("an answer failed")
        durations.append(np.array([perf_counter(), process_time()]) - started)
    ratios = np.array(durations[2::2]) / np.array(durations[3::2])
    report(f"{STREAMS} constrained answers, tokens/s relative to free ones", ratios[:, 0].tolist())
    report("the same, tokens per second of processor time", ratios[:, 1].tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--real", metavar="PLUGIN")
    args = parser.parse_args()
    if args.real is None:
        costs(tokenizer := make_tokenizer())
        throughput(small_engine(tokenizer), tokenizer, args.rounds)
        return
    with tempfile.TemporaryDirectory() as home:
        engine, tokenizer = real_engine(args.real, Path(home))
        judge(engine, tokenizer)
        throughput(engine, tokenizer, args.rounds)


if __name__ == "__main__":
    main()
