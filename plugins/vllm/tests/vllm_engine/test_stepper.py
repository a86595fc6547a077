"""How requests pass through vLLM's engine: a scripted one, so that tests know what it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmserve.runtime import (
    Generation,
    RequestError,
    Stepper,
    TextFormatter,
    run_batch,
)
from llmserve.runtime.contract import LATE_AFTER
from llmserve.testing import ByteTokenizer, generation

from .scripted import LLMEngine, SamplingParams, scripted  # noqa: F401

SETTINGS: dict[str, Any] = {
    "path": "model", "dtype": "float32", "device": "auto", "engine_args": {"max_num_seqs": 8},
}  # fmt: skip


@pytest.fixture
def generator(scripted: type[LLMEngine], tmp_path: Any) -> Any:  # noqa: F811
    del scripted
    from llmserve_vllm.generator import VllmGenerator

    return VllmGenerator(SETTINGS, tmp_path)


@pytest.fixture
def stepper(generator: Any) -> Stepper:
    made: Stepper = generator.stepper(ByteTokenizer())
    return made


def engine() -> LLMEngine:
    return LLMEngine.made[-1]


def ask(text: str = "abc", max_tokens: int = 5, **options: Any) -> Generation:
    return generation(list(text.encode()), max_tokens, eos=frozenset({0}), **options)


def sent() -> Any:
    """Return what vLLM was asked for last."""
    return list(engine().requests.values())[-1].params


def test_a_model_is_loaded_with_the_arguments_of_its_build(generator: Any, tmp_path: Any) -> None:
    arguments = engine().vllm_config.arguments
    assert arguments["model"] == arguments["tokenizer"] == str(tmp_path / "model")
    assert arguments["max_num_seqs"] == 8
    assert arguments["dtype"] == "float32"
    assert "scheduling_policy" not in arguments
    assert arguments["structured_outputs_config"] == {"backend": "guidance"}
    assert (generator.context_length, generator.eos_ids) == (64, frozenset({0}))


def test_on_a_cpu_the_cache_is_of_a_few_contexts_unless_the_build_says_otherwise(
    scripted: type[LLMEngine],  # noqa: F811
) -> None:
    from llmserve_vllm.load import Model

    options = {"trust_remote_code": False}
    Model(SETTINGS, "there", options, Path("there"))
    per_token = 2 * 3 * 2 * 8 * 4
    assert engine().vllm_config.cache_config.kv_cache_memory_bytes == 4 * (64 + 16) * per_token
    Model(
        {**SETTINGS, "engine_args": {"gpu_memory_utilization": 0.5}},
        "there",
        options,
        Path("there"),
    )
    assert engine().vllm_config.cache_config.kv_cache_memory_bytes is None


def test_a_model_built_for_a_gpu_is_not_loaded_by_a_vllm_for_cpus(
    scripted: type[LLMEngine],  # noqa: F811
) -> None:
    from llmserve_vllm.load import Model

    with pytest.raises(RuntimeError, match="built for cuda, and this vLLM is for cpu"):
        Model({**SETTINGS, "device": "cuda"}, "there", {"trust_remote_code": False}, Path())
    assert not LLMEngine.made


def test_answers_are_what_the_engine_chooses(stepper: Stepper) -> None:
    asked = [ask("abc", 5), ask("x", 3), ask("four", 4), ask("no\0", 9)]
    run_batch(stepper, asked)
    assert [g.text for g in asked] == ["abcab", "xxx", "four", "no"]
    assert [g.finish_reason for g in asked] == ["length", "length", "length", "stop"]
    assert {g.cached_tokens for g in asked} == {5}
    assert not stepper.busy


def test_what_waits_and_what_runs_is_counted(stepper: Stepper) -> None:
    for text in "abcd":
        stepper.admit(ask(text))
    stepper.step()
    assert (stepper.live, stepper.waiting) == (2, 2)
    assert (stepper.cache_used, stepper.cache_tokens) == (32, 160)
    assert (stepper.guessed_tokens, stepper.accepted_tokens) == (2, 1)  # type: ignore[attr-defined]


def test_one_that_is_dropped_is_aborted_and_the_others_go_on(stepper: Stepper) -> None:
    gone, stays = ask("abc"), ask("xyz")
    stepper.admit(gone)
    stepper.admit(stays)
    stepper.step()
    stepper.drop(gone)
    assert engine().aborted == ["0"]
    while stepper.busy:
        stepper.step()
    assert (gone.text, stays.text) == ("a", "xyzxy")
    stepper.drop(gone)
    assert engine().aborted == ["0"], "vLLM is not told of what it does not have"


def test_a_stop_word_ends_an_answer_that_vllm_would_continue(stepper: Stepper) -> None:
    asked = ask("hello ", 30, stop_words=["o he"])
    run_batch(stepper, [asked])
    assert (asked.text, asked.finish_reason) == ("hell", "stop")
    assert engine().aborted == ["0"]


def test_a_failed_step_is_raised_and_the_next_request_gets_a_new_engine(stepper: Stepper) -> None:
    lost = ask()
    stepper.admit(lost)
    failed = engine()
    failed.fails = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        stepper.step()
    stepper.drop(lost)
    assert failed.ended
    assert not failed.aborted, "it has ended"
    assert (stepper.busy, stepper.live) == (False, 0)
    assert len(LLMEngine.made) == 1, "nobody waits for an answer"
    again = ask()
    run_batch(stepper, [again])
    assert again.text == "abcab"
    assert len(LLMEngine.made) == 2


def test_an_engine_that_cannot_be_made_anew_fails_one_request_and_is_tried_again(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper.admit(ask())
    engine().fails = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        stepper.step()
    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "from_vllm_config", _no_room)
        with pytest.raises(MemoryError):
            stepper.admit(ask())
    assert not stepper.busy
    again = ask()
    run_batch(stepper, [again])
    assert again.text == "abcab"


def _no_room(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")


def test_only_steps_in_which_nothing_could_run_are_followed_by_a_pause(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are parts of long prompts."""
    from llmserve_vllm import engine as module

    slept: list[float] = []
    # When two empty steps begin and end, in seconds.
    times = iter([1.0, 1.0, 2.0, 2.02])
    clock = SimpleNamespace(perf_counter=lambda: next(times, 3.0), sleep=slept.append)
    monkeypatch.setattr(module, "time", clock)
    asked = ask()
    stepper.admit(asked)
    engine().empty_steps = 2
    stepper.step()
    stepper.step()
    run_batch(stepper, [])
    assert slept == [module._PAUSE, 0.0]
    assert asked.text == "abcab"


def test_a_request_that_vllm_refuses_fails_alone_in_one_line(stepper: Stepper) -> None:
    with pytest.raises(RequestError, match=r"vLLM refuses the request: unlucky$"):
        stepper.admit(ask(temperature=1.0, seed=13))
    assert not stepper.busy


def test_a_request_that_vllm_gives_up_fails_alone(stepper: Stepper) -> None:
    asked = ask()
    stepper.admit(asked)
    engine().ends_with = "error"
    ((failed, error),) = stepper.step().failed
    assert failed is asked
    assert "vLLM ended the request: error" in str(error)
    assert not stepper.busy


def test_one_that_comes_back_goes_on_after_its_last_token(stepper: Stepper) -> None:
    asked = ask("abc", 5, min_tokens=4)
    stepper.admit(asked)
    stepper.step()
    stepper.drop(asked)
    stepper.admit(asked)
    request = list(engine().requests.values())[-1]
    assert request.prompt == list(b"abca")
    assert (request.params.max_tokens, request.params.min_tokens) == (4, 3)
    assert len(asked.token_ids) == 1
    while stepper.busy:
        stepper.step()
    assert asked.text == "a" + "abca"
    assert asked.finish_reason == "length"


def test_one_with_a_seed_begins_again_and_says_nothing_twice(stepper: Stepper) -> None:
    asked = ask("abc", 5, temperature=1.0, seed=3)
    stepper.admit(asked)
    stepper.step()
    stepper.step()
    stepper.drop(asked)
    stepper.admit(asked)
    assert list(engine().requests.values())[-1].prompt == list(b"abc")
    while stepper.busy:
        stepper.step()
    assert (asked.text, len(asked.token_ids)) == ("abcab", 5)


def test_log_probabilities_are_those_of_vllm(stepper: Stepper) -> None:
    asked = ask("ab", 2, logprobs=1, prompt_logprobs=2)
    run_batch(stepper, [asked])
    assert (sent_logprobs := [(one.token, one.value) for one in asked.logprobs])
    assert sent_logprobs == [(97, -3.0), (98, -3.0)]
    assert [[top.token for top in one.top] for one in asked.logprobs] == [[91], [91]]
    assert asked.total_logprob == -6.0
    first, second = asked.prompt_logprobs
    assert np.isnan(first.value)
    assert (second.token, second.value) == (98, -3.0)
    assert [top.token for top in second.top] == [91, 90]


def test_named_tokens_have_the_log_probabilities_of_vllm(stepper: Stepper) -> None:
    asked = ask("ab", 1, logprobs=0, scored=(98, 7, 999))
    run_batch(stepper, [asked])
    (found,) = asked.logprobs
    assert (found.token, found.value) == (97, -97.0)
    # The last is one that the model has no score for, with which vLLM would refuse the request.
    assert [(top.token, top.value) for top in found.top] == [(98, -98.0), (7, -7.0), (999, -np.inf)]


def test_a_vllm_that_cannot_tell_them_refuses_named_tokens(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SamplingParams, "logprob_token_ids")
    with pytest.raises(RequestError, match="of given tokens"):
        stepper.admit(ask("ab", 1, logprobs=0, scored=(98,)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.0, "seed": None, "stop_token_ids": [0], "ignore_eos": True}),
        ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}),
        ({"temperature": 0.7, "top_k": -1}, {"temperature": 0.7, "top_k": 0}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5}),
        ({"temperature": 0.7, "top_k": 1}, {"temperature": 0.0}),
        ({"temperature": 1.0, "seed": 2**64 - 1}, {"seed": 2**63 - 1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0}),
        ({"min_tokens": 9}, {"min_tokens": 5, "max_tokens": 5}),
        ({"ignore_eos": True}, {"stop_token_ids": []}),
        ({"end_id": 98}, {"stop_token_ids": [98]}),
        ({"end_id": 9999}, {"stop_token_ids": []}),
        ({"logit_bias": {98: 5.0, 9999: 1.0}}, {"logit_bias": {98: 5.0}}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"return_log_probs": True}, {"logprobs": 0}),
        ({"bad_words": ["no"]}, {"_bad_words_token_ids": [list(b"no"), list(b" no")]}),
    ],
)
def test_every_option_reaches_vllm(
    stepper: Stepper, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    asked = generation(list(b"abc"), 5, eos=frozenset({options.get("end_id", 0)}), **options)
    stepper.admit(asked)
    assert {name: getattr(sent(), name) for name in expected} == expected
    assert not sent().detokenize


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", 2.1), ("presence_penalty", -3), ("frequency_penalty", 9)]
)
def test_what_vllm_does_not_take_is_refused_by_name(
    stepper: Stepper, option: str, value: float
) -> None:
    options: Any = {option: value}
    with pytest.raises(RequestError) as refused:
        stepper.admit(ask(**options))
    assert (refused.value.code, refused.value.param) == ("invalid_value", option)
    assert not stepper.busy


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"choice": ["a.b", "c"]}, {"regex": r"a\.b|c"}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_forms_are_vllms_to_enforce(
    stepper: Stepper, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    asked = ask(temperature=1.0, **options)
    stepper.admit(asked)
    form = sent().structured_outputs
    assert {name: getattr(form, name) for name in expected} == expected
    assert sent().seed is not None, "an answer that has to begin again begins in the same way"


def test_a_schema_says_itself_how_much_space_there_may_be(stepper: Stepper) -> None:
    stepper.admit(ask(json_schema='{"type": "integer"}'))
    assert '"type": "integer", "x-guidance"' in sent().structured_outputs.json


def test_a_constraint_that_is_not_ours_is_refused(stepper: Stepper) -> None:
    asked = ask()
    asked.constraint = lambda _: None
    with pytest.raises(RequestError) as refused:
        stepper.admit(asked)
    assert refused.value.code == "unsupported_option"
    assert not engine().requests


def test_a_form_that_cannot_be_enforced_is_refused_before_vllm_sees_it(
    stepper: Stepper, tmp_path: Any
) -> None:
    pytest.importorskip("llguidance")
    from llmserve.plugin import demo_model_path
    from llmserve.runtime import TransformersTokenizer

    tokenizer = TransformersTokenizer({"path": str(demo_model_path())}, tmp_path)
    formatter = TextFormatter({}, tmp_path)
    try:
        bad, good = ask(regex="(["), ask("aba", regex="[ab]{5}")
        for asked in (bad, good):
            asked.constraint = formatter.constrain(asked, tokenizer)
        with pytest.raises(RequestError) as refused:
            stepper.admit(bad)
        assert (refused.value.code, refused.value.param) == ("invalid_value", "regex")
        assert not engine().requests
        run_batch(stepper, [good])
        assert good.text == "abaab"
    finally:
        formatter.close()


def test_vllm_is_told_classes_if_it_heeds_them(generator: Any, tmp_path: Path) -> None:
    from llmserve_vllm.generator import VllmGenerator

    def told(made: Any) -> int:
        made.stepper(ByteTokenizer()).admit(ask(priority_class=-3))
        return list(engine().requests.values())[-1].priority

    assert told(generator) == 0
    settings = {**SETTINGS, "engine_args": {"scheduling_policy": "priority"}}
    assert told(VllmGenerator(settings, tmp_path)) == -3


def test_a_class_above_goes_first_and_nobody_starves(generator: Any) -> None:
    from llmserve_vllm.engine import VllmStepper

    now = 0.0
    tokenizer = ByteTokenizer()
    adapters = generator.stepper(tokenizer)._adapters
    generator._model.has_classes = True
    stepper = VllmStepper(generator._model, tokenizer, adapters, clock=lambda: now)
    below = [ask("low", 3, priority_class=1001), ask("law", 3, priority_class=1001, seed=1)]
    others: list[Generation] = []
    for each in below:
        stepper.admit(each)
    stepper.step()
    ended: list[float] = []
    # Two run at once, and there are always two of a class above.
    while len(ended) < len(below) and now < 200:
        others = [each for each in others if not each.done]
        while len(others) < 2:
            others.append(ask("above", 4))
            stepper.admit(others[-1])
        now += 1
        assert not stepper.step().failed
        ended += [now] * (sum(each.done for each in below) - len(ended))
    # Each goes on at the latest after its patience and the answer of the other.
    assert LATE_AFTER <= ended[0] <= ended[1] <= LATE_AFTER + 2 * 3 + 2
    # What is scripted repeats its prompt: "low" and the token that it had, and then again; the one
    # with a seed begins again, and says nothing twice.
    assert ["".join(map(chr, each.token_ids)) for each in below] == ["llo", "law"]
