"""The engine with a small runner: no answer depends on another; only needed rows are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.contract.classes import LAST_CLASS
from llmserve.runtime import DraftModel, Engine, Generation, Guesser, PromptLookup
from llmserve.runtime.engine.guessing import Price
from llmserve.runtime.engine.page_files import PageFiles
from llmserve.runtime.engine.warm import WarmPages
from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from tests.recall import VOCABULARY, RecallingRunner, RecallRunner, embedded

Request = dict[str, Any]

tokens = st.integers(0, VOCABULARY - 1)
options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.7, 1.5]),
        "top_k": st.integers(1, 5),
        "repetition_penalty": st.just(1.3),
        "min_tokens": st.integers(1, 6),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "logit_bias": st.just({3: 5.0}),
        "keep_longer": st.booleans(),
        "priority_class": st.sampled_from([-1, 1, LAST_CLASS]),
    },
)
requests = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            st.lists(tokens, min_size=1, max_size=20),
            st.integers(1, 20).map(lambda length: [(3 * i) % VOCABULARY for i in range(length)]),
        ),
        "length": st.integers(1, 16),
        "params": options,
        "seed": st.integers(0, 3),
        "steps_before_next": st.integers(0, 5),
        "cancelled_after": st.one_of(st.none(), st.integers(0, 12)),
    },
    optional={
        # Which image begins after how many more tokens, and of how many it is.
        "images": st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(1, 9)), max_size=3
        ),
    },
)
MARK = 9
"""The token that stands for a part of an image."""


GUESSERS: dict[str, Callable[[], Guesser | None]] = {
    "none": lambda: None,
    "lookup": lambda: PromptLookup(3),
    "draft": lambda: DraftModel(RecallRunner(noise=0.4), 3),
    "itself": lambda: DraftModel(RecallRunner(40), 5),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


def made(request: Request) -> Generation:
    params = {"seed": request["seed"], **request["params"]}
    prompt, images = list(request["prompt"]), []
    at = 0
    for image, after, count in request.get("images", ()):
        at += after
        # The last token is one of text, as in any prompt.
        if at + count < len(prompt):
            prompt[at : at + count] = [MARK] * count
            # Of some images, all tokens see each other.
            images.append(embedded(at, count, image, is_whole=image % 2 == 1))
            at += count
    return generation(prompt, request["length"], images=tuple(images), **params)


@pytest.fixture(scope="module", autouse=True)
def _guesses_pay() -> Iterator[None]:
    """With so small a model a row costs nearly as much as a pass, and no guess would be made."""
    with mock.patch.object(Price, "of_guess", return_value=0.2):
        yield


def finish(engine: Engine) -> int:
    steps = 0
    while engine.busy:
        assert not engine.step().failed
        steps += 1
        assert steps < 3000, "the engine does not finish"
    return steps


def alone(request: Request) -> Generation:
    engine = Engine(RecallRunner(), ByteTokenizer(), max_sequences=1)
    engine.admit(answer := made(request))
    finish(engine)
    return answer


def outcome(answer: Generation) -> tuple[object, ...]:
    logprobs = [repr(logprob) for logprob in (*answer.logprobs, *answer.prompt_logprobs)]
    return answer.token_ids, answer.finish_reason, logprobs


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(requests, min_size=1, max_size=8),
    max_sequences=st.integers(1, 5),
    pages=st.sampled_from([9, 12, 40]),
    prefill_chunk=st.sampled_from([1, 3, 8, 64]),
    share_prefixes=st.booleans(),
    guesser=st.sampled_from(sorted(GUESSERS)),
    failing=st.sets(st.integers(0, 30), max_size=3),
    copies=st.sampled_from([None, 0, 1, 3, 50]),
    is_warm=st.booleans(),
)
def test_any_mix_gives_the_answers_that_each_gets_alone(
    arrivals: list[Request],
    max_sequences: int,
    pages: int,
    prefill_chunk: int,
    share_prefixes: bool,
    guesser: str,
    failing: set[int],
    copies: int | None,
    is_warm: bool,
    kept: Path,
) -> None:
    runner = RecallRunner(pages) if copies is None else RecallingRunner(pages, most_copies=copies)
    warm = None
    if is_warm:
        # There are pages from all examples before.
        warm = WarmPages(runner, PageFiles(kept, 1_000_000), str(copies).encode(), "model")
    engine = Engine(
        runner,
        ByteTokenizer(),
        max_sequences=max_sequences,
        prefill_chunk=prefill_chunk,
        share_prefixes=share_prefixes,
        guesser=GUESSERS[guesser](),
        warm=warm,
    )
    answers: list[Generation] = []
    cancelled: dict[Generation, int] = {}
    steps = 0

    def step() -> None:
        nonlocal steps
        runner.fail_next = steps in failing
        steps += 1
        try:
            assert not engine.step().failed
        except RuntimeError:
            pass
        finally:
            runner.fail_next = False
        for answer in list(cancelled):
            cancelled[answer] -= 1
            if cancelled[answer] < 0:
                engine.drop(answer)
                del cancelled[answer]

    for request in arrivals:
        engine.admit(answer := made(request))
        answers.append(answer)
        if request["cancelled_after"] is not None:
            cancelled[answer] = request["cancelled_after"]
        for _ in range(request["steps_before_next"]):
            step()
    while engine.busy:
        step()
        assert steps < 3000, "the engine does not finish"
    assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)
    engine.close()
    for request, answer in zip(arrivals, answers, strict=True):
        if answer.done:
            assert outcome(answer) == outcome(alone(request))
        else:
            assert request["cancelled_after"] is not None
    if copies == 0 or not share_prefixes:
        assert not any(answer.cached_tokens for answer in answers)
    if isinstance(runner, RecallingRunner):
        assert len(runner.states) <= runner.most_copies


def of_states(most_copies: int = 50, *, pages: int = 64) -> tuple[Engine, RecallingRunner]:
    runner = RecallingRunner(pages, most_copies=most_copies)
    return Engine(runner, ByteTokenizer(), max_sequences=4, prefill_chunk=8), runner


def answered(engine: Engine, prompt: list[int], length: int = 6) -> Generation:
    engine.admit(answer := generation(prompt, length))
    finish(engine)
    whole = alone({"prompt": prompt, "length": length, "params": {}, "seed": 0})
    assert answer.token_ids == whole.token_ids
    return answer


def test_a_state_is_copied_where_a_beginning_is_shared() -> None:
    engine, _ = of_states()
    system = [(7 * i) % 50 for i in range(42)]
    found = [answered(engine, [*system, *user]).cached_tokens for user in ([1] * 9, [2] * 9, [3])]
    # The second finds what is kept after a piece; where it parted from the first, it keeps its
    # own, which the third finds.
    assert found == [0, 40, 40]
    engine, _ = of_states()
    found = [answered(engine, [*system[:39], *user]).cached_tokens for user in ([1], [2], [3])]
    assert found == [0, 36, 36]
    engine, _ = of_states()
    found = [answered(engine, [*system[:30], *user]).cached_tokens for user in ([1] * 9, [2], [3])]
    assert found == [0, 24, 28]


def test_a_sequence_that_lost_its_place_goes_on_after_the_newest_copy() -> None:
    engine, _ = of_states(pages=18)
    prompts = [[n] * 9 for n in (1, 2)]
    many = [generation(prompt, 30) for prompt in prompts]
    for each in many:
        engine.admit(each)
    finish(engine)
    for prompt, each in zip(prompts, many, strict=True):
        whole = alone({"prompt": prompt, "length": 30, "params": {}, "seed": 0})
        assert each.token_ids == whole.token_ids
    without, _ = of_states(0, pages=18)
    for prompt in prompts:
        without.admit(generation(prompt, 30))
    finish(without)
    assert 2 * 38 < engine.tokens_computed < without.tokens_computed


def test_an_answer_keeps_one_copy_and_all_together_as_many_as_allowed() -> None:
    engine, runner = of_states()
    answered(engine, [1, 2, 3], 40)
    assert len(runner.states) == 1
    engine, runner = of_states(2)
    for start in range(4):
        answered(engine, list(range(start, 40)))
    assert len(runner.states) == 2


def test_only_rows_that_are_needed_leave_the_runner() -> None:
    runner = RecallRunner(64)
    engine = Engine(runner, ByteTokenizer(), max_sequences=2, prefill_chunk=10)
    engine.admit(generation(list(range(35)), 3))
    finish(engine)
    rows = [[chunk.rows for chunk in chunks] for chunks in runner.passes]
    assert rows == [[0], [0], [0], [1], [1], [1]]


def test_log_probabilities_of_a_prompt_need_few_passes() -> None:
    runner = RecallRunner(64)
    engine = Engine(runner, ByteTokenizer(), max_sequences=2, prefill_chunk=100)
    engine.admit(answer := generation([(7 * i) % 50 for i in range(150)], 2, prompt_logprobs=0))
    assert finish(engine) == 4
    assert len(answer.prompt_logprobs) == 150
    assert max(chunk.rows for chunks in runner.passes for chunk in chunks) == 64


def seen(engine: Engine, *images: int, question: int = 1) -> Generation:
    """Return an answer about images of ten tokens each, with a token around each."""
    parts = [embedded(1 + 11 * place, 10, image) for place, image in enumerate(images)]
    prompt = [*([5, *[MARK] * 10] * len(images)), question, question, question]
    engine.admit(answer := generation(prompt, 6, images=parts))
    finish(engine)
    (cold := Engine(RecallRunner(), ByteTokenizer(), max_sequences=1)).admit(
        expected := generation(prompt, 6, images=parts)
    )
    finish(cold)
    assert answer.token_ids == expected.token_ids
    return answer


piece = st.one_of(st.integers(1, 2), st.tuples(st.integers(0, 1), st.integers(3, 6)))


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(piece, min_size=1, max_size=6), min_size=2, max_size=6),
    prefill_chunk=st.sampled_from([1, 5, 64]),
)
def test_no_more_is_found_of_a_prompt_than_it_has_in_common_with_those_before(
    prompts: list[list[int | tuple[int, int]]], prefill_chunk: int
) -> None:
    engine = Engine(
        RecallRunner(200), ByteTokenizer(), max_sequences=1, prefill_chunk=prefill_chunk
    )
    earlier: list[list[object]] = []
    for pieces in prompts:
        content: list[object] = []
        images = []
        for each in pieces:
            if isinstance(each, tuple):
                images.append(embedded(len(content), each[1], each[0], is_whole=each[0] == 1))
                content += [(*each, place) for place in range(each[1])]
            else:
                content.append(each)
        content.append(3)
        ids = [each if isinstance(each, int) else MARK for each in content]
        engine.admit(answer := generation(ids, 1, images=images))
        finish(engine)
        (cold := Engine(RecallRunner(), ByteTokenizer(), max_sequences=1)).admit(
            expected := generation(ids, 1, images=images)
        )
        finish(cold)
        assert answer.token_ids == expected.token_ids
        common = [_common(content[:-1], other) for other in earlier]
        # Perhaps less: the next page of a beginning may have been taken for another end.
        assert (answer.cached_tokens or 0) <= max(common, default=0)
        earlier.append(content)


def _common(content: list[object], other: list[object]) -> int:
    """Return how many of the first of both are the same."""
    pairs = zip(content, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(content), len(other)))


def test_pages_are_shared_by_who_has_the_same_images_and_by_nobody_else() -> None:
    engine = Engine(RecallRunner(64), ByteTokenizer(), max_sequences=2, prefill_chunk=7)
    asked = [(0, 1), (0, 1), (0, 2), (1, 0), (3,), (0,)]
    found = [seen(engine, *images, question=n).cached_tokens for n, images in enumerate(asked, 20)]
    # Of the second, all but the page where the question begins; of the third, what is before its
    # second image.
    assert found == [0, 20, 12, 0, 0, 8]
    prompt = [5, *[MARK] * 10, 1, 1, 1]
    engine.admit(text := generation(prompt, 6))
    finish(engine)
    assert text.cached_tokens == 0, "the same tokens, and no image"


def pieces(*questions: tuple[int, int], prefill_chunk: int) -> list[list[tuple[int, int]]]:
    """Return where the pieces of each pass begin and end, until all questions are read: each has
    so many tokens before an image, and so many in it, which see each other."""
    runner = RecallRunner(64)
    engine = Engine(runner, ByteTokenizer(), max_sequences=4, prefill_chunk=prefill_chunk)
    for number, (before, count) in enumerate(questions):
        image = embedded(before, count, number, is_whole=True)
        prompt = [*[number] * before, *[MARK] * count, number, 1, 2]
        engine.admit(generation(prompt, 1, images=[image]))
    finish(engine)
    return [[(chunk.start, chunk.stop) for chunk in chunks] for chunks in runner.passes]


def test_no_piece_of_a_prompt_ends_among_tokens_that_see_each_other() -> None:
    assert pieces((5, 10), prefill_chunk=64) == [[(0, 18)]]
    assert pieces((5, 10), prefill_chunk=12) == [[(0, 5)], [(5, 17)], [(17, 18)]]
    assert pieces((5, 10), prefill_chunk=3) == [[(0, 3)], [(3, 5)], [(5, 15)], [(15, 18)]]
    assert pieces((0, 10), prefill_chunk=1) == [[(0, 10)], [(10, 11)], [(11, 12)], [(12, 13)]]


def test_what_is_more_than_a_step_reads_is_read_in_one_of_its_own() -> None:
    read = pieces((2, 2), (0, 10), prefill_chunk=8)
    assert read == [[(0, 7)], [(0, 10)], [(10, 13)]]


def test_a_beginning_may_be_shared_that_ends_among_tokens_that_see_each_other() -> None:
    runner = RecallRunner(64)
    engine = Engine(runner, ByteTokenizer(), max_sequences=2, prefill_chunk=3)
    image, found = embedded(2, 9, 0, is_whole=True), []
    for question in (1, 2):
        engine.admit(answer := generation([5, 5, *[MARK] * 9, question], 1, images=[image]))
        finish(engine)
        found.append(answer.cached_tokens)
    # Pages have four tokens. The rest of the image is read in one piece.
    assert found == [0, 8]
    starts = [(chunk.start, chunk.stop) for chunks in runner.passes for chunk in chunks]
    assert starts == [(0, 2), (2, 11), (11, 12), (8, 11), (11, 12)]


def test_a_runner_gets_the_images_of_a_chunk_again_when_a_sequence_lost_its_pages() -> None:
    runner = RecallRunner(9)
    engine = Engine(runner, ByteTokenizer(), max_sequences=2, share_prefixes=False)
    parts = [embedded(1, 10, 0)]
    prompt = [5, *[MARK] * 10, 1]
    both = [generation(prompt, 16, images=parts) for _ in range(2)]
    for each in both:
        engine.admit(each)
    finish(engine)
    first = [c for chunks in runner.passes for c in chunks if not c.start and c.embedded]
    assert len(first) == 3, "twice at first, and once again"
    assert both[0].token_ids == both[1].token_ids
    assert seen(engine, 0).cached_tokens == 0


def test_a_pass_that_fails_may_be_tried_again() -> None:
    runner = RecallRunner()
    engine = Engine(runner, ByteTokenizer(), max_sequences=2)
    engine.admit(answer := generation([1, 2, 3, 4, 5], 8))
    engine.step()
    runner.fail_next = True
    with pytest.raises(RuntimeError, match="the pass failed"):
        engine.step()
    finish(engine)
    whole = alone({"prompt": [1, 2, 3, 4, 5], "length": 8, "params": {}, "seed": 0})
    assert answer.token_ids == whole.token_ids
