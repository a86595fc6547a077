from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from llmserve.demo import demo_model_path
from llmserve.errors import UsageError
from llmserve.manifest import Manifest
from llmserve.measure.arrivals import arrival_times
from llmserve.measure.dataset import Sample, read_dataset
from llmserve.measure.plan import Lengths, Prompts, plan_requests
from llmserve.measure.runs import Load
from llmserve.measure.synthetic import make_prompt
from llmserve.measure.tokens import Counter, find_counter

WORDS = Counter(lambda text: len(text.split()), exact=True, source="words")
SEED_003 = [
    {"input": "A long article.", "instruction": "Summarize it:", "output": "It is short ."},
    {"input": "Another one.", "instruction": "Summarize it:", "output": "Shorter ."},
]


def written(folder: Path, content: str) -> Path:
    path = folder / "prompts"
    path.write_text(content, encoding="utf-8")
    return path


def test_the_form_of_seed_003_is_read(tmp_path: Path) -> None:
    samples = read_dataset(written(tmp_path, json.dumps(SEED_003)))
    assert samples[0] == Sample("A long article. Summarize it:", "It is short .")
    assert len(samples) == 2


def test_json_lines_and_plain_text_are_told_apart(tmp_path: Path) -> None:
    lines = '{"prompt": "one", "output_tokens": 7}\n\n{"text_input": "two", "completion": "x"}\n'
    assert read_dataset(written(tmp_path, lines)) == [Sample("one", None, 7), Sample("two", "x")]
    assert read_dataset(written(tmp_path, "one\r\n\n two \n")) == [Sample("one"), Sample(" two ")]
    assert read_dataset(written(tmp_path, '["one", "two"]')) == [Sample("one"), Sample("two")]


def test_plain_text_may_begin_as_json_does(tmp_path: Path) -> None:
    for line in ("[INST] Hello [/INST]", "{name}, who are you?", "[1] is a footnote", "{", "[]x"):
        assert read_dataset(written(tmp_path, f"{line}\nmore\n")) == [Sample(line), Sample("more")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no prompts"),
        ("[]", "holds no prompts"),
        (" \n\n", "holds no prompts"),
        ('{"data": [{"prompt": "x"}]}', "its keys are data"),
        ("[1]", "entry 1 is no object"),
        ('[{"question": "x"}]', "its keys are question"),
        ('[{"prompt": 3}]', "prompt is no text"),
        ('[{"prompt": "x", "max_tokens": 0}]', "max_tokens is no number above 0"),
        ('[{"prompt": "x"', "is no JSON"),
        ('{"prompt": "x"}\n{"prompt"', "line 2 is no JSON"),
    ],
)
def test_a_wrong_dataset_is_one_line_with_its_place(
    tmp_path: Path, content: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        read_dataset(written(tmp_path, content))


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    times = arrival_times("poisson", 50.0, 7, count=5000, duration=None)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # Of an exponential distribution, 1 - 1/e lie below the mean.
    assert fmean(gap < 1 / 50 for gap in gaps) == pytest.approx(0.632, abs=0.02)
    assert times == arrival_times("poisson", 50.0, 7, count=5000, duration=None)
    assert times != arrival_times("poisson", 50.0, 8, count=5000, duration=None)


def test_a_duration_bounds_arrivals() -> None:
    assert arrival_times("constant", 2.0, 0, count=None, duration=2.0) == [0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_made_up_prompts_have_the_tokens_asked_for(tokens: int) -> None:
    assert WORDS.count(make_prompt(WORDS, tokens, random.Random(0))) == tokens


def test_made_up_prompts_are_exact_by_the_models_own_tokenizer() -> None:
    counter = find_counter(None, "demo", demo_model_path())
    assert counter.exact
    draw = random.Random(0)
    prompts = [make_prompt(counter, 40, draw) for _ in range(20)]
    assert {counter.count(prompt) for prompt in prompts} == {40}
    assert len({prompt[:12] for prompt in prompts}) > 10


def test_without_a_tokenizer_lengths_are_an_estimate_that_says_so(tmp_path: Path) -> None:
    counter = find_counter(tmp_path, "demo")
    assert not counter.exact
    assert counter.count("x" * 40) == 10
    assert "no tokenizer at hand" in Prompts().describe(counter)
    with pytest.raises(UsageError, match="no tokenizer folder"):
        find_counter(None, "demo", tmp_path / "missing")


def test_the_models_own_tokenizer_is_called_so_wherever_it_lies() -> None:
    counter = find_counter(Path(__file__).parents[2] / "model_repository", "demo")
    assert counter.exact
    assert Prompts().describe(counter) == "made up, 32 tokens (the model's own tokenizer)"


def test_the_tokenizer_of_an_ensemble_is_with_its_part(tmp_path: Path) -> None:
    def model(name: str, parts: tuple[str, ...] = (), part_of: str = "") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        runtime = "llmserve.runtime.hf_tokenizer:TransformersTokenizer"
        part = {"name": "transformers", "runtime": runtime, "settings": {"path": "tokenizer"}}
        Manifest(
            name=name, recipe="r", plugin="p", exchange="unary", source={}, options={},
            components={"tokenizer": part}, contract={}, packages={}, trust_remote_code=False,
            llmserve="0", part_of=part_of, parts=parts,
        ).write(folder)  # fmt: skip
        return folder

    # NVIDIA's names, of which none begins with that of another.
    model("ensemble", parts=("preprocessing",))
    part = model("preprocessing", part_of="ensemble")
    shutil.copytree(demo_model_path(), part / "1" / "tokenizer")
    counter = find_counter(tmp_path, "ensemble")
    assert counter.exact
    assert counter.count("Hello") == find_counter(None, "x", demo_model_path()).count("Hello")


def plan(load: Load, prompts: Prompts, *, ours: bool = True) -> list[tuple[str, Any, Any]]:
    _, asks = plan_requests(load, prompts, WORDS, ours=ours)
    return [(ask.prompt, dict(ask.options), ask.at) for ask in asks]


def test_the_same_seed_plans_the_same_and_another_does_not() -> None:
    prompts = Prompts(input_tokens=Lengths(8, 3), output_tokens=Lengths(20, 5))
    load = Load.open(5.0, requests=20, seed=3)
    assert plan(load, prompts) == plan(load, prompts)
    assert plan(load, prompts) != plan(Load.open(5.0, requests=20, seed=4), prompts)


def test_answers_have_the_length_of_the_data_sets(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(SEED_003))
    made = plan(Load.closed(1, requests=3), Prompts(path))
    assert [options for _, options, _ in made] == [
        {"max_tokens": 4, "ignore_eos": True},
        {"max_tokens": 2, "ignore_eos": True},
        {"max_tokens": 4, "ignore_eos": True},
    ]
    # What only our models understand is sent to no other.
    assert plan(Load.closed(1, requests=1), Prompts(path), ours=False)[0][1] == {"max_tokens": 4}


def test_what_is_given_for_every_request_comes_first(tmp_path: Path) -> None:
    load = Load.closed(1, requests=1, options={"max_tokens": 9, "temperature": 0.5})
    made = plan(load, Prompts(written(tmp_path, json.dumps(SEED_003))))
    assert made[0][1] == {"max_tokens": 9, "temperature": 0.5, "ignore_eos": True}


def test_prompts_that_are_too_long_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, "one\none two three\n")
    made = plan(Load.closed(1, requests=2), Prompts(path, max_input_tokens=2))
    assert [prompt for prompt, _, _ in made] == ["one", "one"]
    with pytest.raises(UsageError, match="raise --max-input-tokens"):
        plan(Load.closed(1, requests=2), Prompts(written(tmp_path, "a b c"), max_input_tokens=2))


@pytest.mark.parametrize("text", ["", "x", "0", "-4", "8,-1", "8,2,3", "nan", "inf", "8,inf"])
def test_a_length_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no length"):
        Lengths.parse(text)


def test_the_warm_up_has_prompts_of_its_own_where_they_are_made_up() -> None:
    # A server that keeps what it has read of a prompt would have a part of the work done.
    prompts = Prompts(input_tokens=Lengths(6, 2), output_tokens=Lengths(9, 3))
    warmup, asks = plan_requests(Load.closed(8, requests=3), prompts, WORDS, ours=True)
    assert len(warmup) == 8
    assert not {ask.prompt for ask in warmup} & {ask.prompt for ask in asks}
    assert all(ask.options["ignore_eos"] for ask in warmup)
    # How many there are changes nothing about what is measured.
    _, others = plan_requests(Load.closed(8, requests=3, warmup=0), prompts, WORDS, ours=True)
    assert others == asks


def test_the_warm_up_repeats_the_requests_of_a_dataset(tmp_path: Path) -> None:
    prompts = Prompts(written(tmp_path, "one\ntwo\nthree\n"))
    warmup, _ = plan_requests(Load.closed(8, requests=3, warmup=4), prompts, WORDS, ours=True)
    assert [ask.prompt for ask in warmup] == ["one", "two", "three", "one"]


def test_lengths_have_the_mean_and_the_spread_asked_for() -> None:
    prompts = Prompts(input_tokens=Lengths(128, 16), output_tokens=Lengths(64, 8))
    made = plan(Load.closed(1, requests=1000), prompts)
    read = [WORDS.count(prompt) for prompt, _, _ in made]
    written = [options["max_tokens"] for _, options, _ in made]
    for found, mean, deviation in ((read, 128, 16), (written, 64, 8)):
        assert fmean(found) == pytest.approx(mean, rel=0.02)
        assert stdev(found) == pytest.approx(deviation, rel=0.1)


def test_more_arrivals_than_anybody_can_mean_are_refused() -> None:
    with pytest.raises(UsageError, match="requests"):
        plan(Load.open(1e9, duration=10.0), Prompts())
