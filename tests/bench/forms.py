"""What it costs to hold answers to a form: `python -m tests.bench.forms [ROUNDS]`.

128,000 tokens, random weights. 32 answers of `iterative`'s engine, free and held, come in turns;
where others keep the machine busy, the processor's time tells more than the wall's.
"""

import json
import sys
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from llmserve.runtime import Generation, RequestError, TextFormatter, read_params
from llmserve_iterative.engine.engine import Engine

SIZE, STREAMS, TOKENS = 128_000, 32, 48
SCHEMAS = json.loads((Path(__file__).parents[1] / "unit/schemas.json").read_text("utf-8"))
FORMATTER = TextFormatter({}, Path())


def make_tokenizer() -> Any:
    """Return one whose tokens are bytes and, for want of a language, all beginnings of words."""
    syllables = [a + b for a, b in product("bcdfghjklmnprstvw", "aeiou")]
    words = ("".join(parts) for n in (1, 2, 3) for parts in product(syllables, repeat=n))
    begun = (f"{space}{word[:end]}" for word in words for end in range(1, 7) for space in ("", "Ġ"))
    known = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *begun])
    ids = {word: number for number, word in enumerate([*known][: SIZE - 1])}
    merges = [(word[:-1], word[-1]) for word in ids if len(word) > 1]
    made = Tokenizer(models.BPE(ids, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    eos = frozenset({SIZE - 1})
    return SimpleNamespace(eos_ids=eos, tokenizer_json=made.to_str, decode=made.decode)


def begin(tokenizer: Any, schema: Any) -> Generation:
    params = read_params({} if schema is None else {"json_schema": json.dumps(schema)})
    ends, decode = tokenizer.eos_ids, tokenizer.decode
    one = Generation([5, 6, 7], params, max_tokens=TOKENS, eos_ids=ends, decode=decode)
    one.constraint = FORMATTER.constrain(one, tokenizer)
    return one


def tell(what: str, values: list[float]) -> None:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    print(f"{what}: {middle:.3g} ({low:.3g} to {high:.3g}, n={len(values)})", flush=True)


def costs(tokenizer: Any) -> None:
    compiled, masked = [], []
    scores = np.random.default_rng(0).normal(size=(TOKENS, SIZE))
    for schema in chain(*SCHEMAS.values()):
        begun = process_time()
        with suppress(RequestError):
            one = begin(tokenizer, schema)
            compiled.append((process_time() - begun) * 1e3)
            while not one.done:
                row = scores[len(one.token_ids)].copy()
                begun = process_time()
                one.constrain(row)
                masked.append((process_time() - begun) * 1e3)
                one.push(int(row.argmax()))
    tell("ms to compile a schema", compiled[1:])
    tell("ms to mask a token", masked)


def throughput(tokenizer: Any, rounds: int) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=SIZE)).eval()
    engine = Engine(model, tokenizer, max_sequences=STREAMS, cache_tokens=STREAMS * 128)
    schema = {"type": "array", "items": SCHEMAS["documents"][0], "minItems": 9}
    taken = []
    for asked in (None, schema) * (rounds + 1):
        several = [begin(tokenizer, asked) for _ in range(STREAMS)]
        begun = np.array([perf_counter(), process_time()])
        for one in several:
            engine.admit(one)
        while engine.busy:
            engine.step()
        taken.append(np.array([perf_counter(), process_time()]) - begun)
    ratios = np.array(taken[2::2]) / np.array(taken[3::2])
    tell(f"{STREAMS} held answers, tokens/s of free ones", ratios[:, 0].tolist())
    tell("the same, tokens a second of the processor", ratios[:, 1].tolist())


if __name__ == "__main__":
    costs(tokenizer := make_tokenizer())
    throughput(tokenizer, int(sys.argv[1]) if sys.argv[1:] else 5)
