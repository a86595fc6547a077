"""Test classes that check what every recipe promises; a subclass sets the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmserve.errors import LLMServeError, ModelNotReadyError
from llmserve.repository import config as modelconfig
from llmserve.repository.repository import Model
from llmserve.testing.checks import ALL_ROLES, TEXT, RecipeChecks, all_at_once
from llmserve.testing.live import LiveTriton

_UNUSUAL = ("👩‍👩‍👧‍👦 and 🏳️‍🌈 are", "日本語のテキストは")
"""Prompts whose answers may have characters of several tokens."""


class BuildConformance(RecipeChecks):
    """What every recipe promises, whatever its models answer with."""

    @pytest.fixture
    def name(self, triton: LiveTriton) -> str:
        try:
            return triton.build(self.recipe, self.model, **self.options)
        except LLMServeError as error:
            self._error("building and loading it", error)

    def test_building_again_gives_the_same_bytes(
        self, triton: LiveTriton, name: str, tmp_path: Path
    ) -> None:
        """Builds contain no time, no path of this machine and no random order."""
        folders = triton.repository / name, self._build(name, tmp_path / "repo").folder
        first, second = (Model(folder).files for folder in folders)
        files = {**first, **second}
        changed = sorted(file for file in files if first.get(file) != second.get(file))
        promise = "two builds with the same arguments write the same files"
        self._expect([], changed, promise=promise, roles=ALL_ROLES)
        old, new = ((folder / "llmserve.json").read_text().splitlines() for folder in folders)
        self._expect_each(
            [f"line {number}" for number in range(1, len(old) + 1)],
            old,
            new,
            promise="two builds with the same arguments write the same llmserve.json",
            roles=ALL_ROLES,
        )


class RecipeConformance(BuildConformance):
    """The tests of a recipe. ``model`` is the model to build, ``options`` are those of the builds.

    >>> class TestAcme(RecipeConformance):
    ...     recipe = "acme"
    ...     options = {"max_batch_size": 4}

    A failure names the recipe and its plugin, the expected and actual results, and the components
    to look at. A test of an option that no component declares checks that the option is refused,
    and is then skipped.
    """

    over_context: ClassVar[str] = "word " * 5000

    def test_configuration_follows_the_contract(self, triton: LiveTriton, name: str) -> None:
        """The configuration is valid, is named like its folder and has the contract's tensors."""
        config = modelconfig.read(triton.repository / name)
        promise = "its config.pbtxt follows the contract"
        self._expect(name, config.name, promise=promise, roles=("generator",))
        for tensor, declared in (("text_input", config.input), ("text_output", config.output)):
            names = sorted(entry.name for entry in declared)
            if tensor not in names:
                self._fail(f"a tensor {tensor}", names, promise=promise, roles=TEXT)
        manifest = Model(triton.repository / name).intact()
        exchange = config.parameters["llmserve.exchange"].string_value
        self._expect(manifest and manifest.exchange, exchange, promise=promise)

    def test_answers_in_a_batch_equal_answers_alone(self, triton: LiveTriton, name: str) -> None:
        alone = self._answers_alone(triton, name, self.prompts)
        promise = "an answer is the same alone and beside others"
        for _ in range(2):
            together = all_at_once(lambda p: self._answer(triton, name, p), self.prompts)
            self._expect_each(self.prompts, alone, together, promise=promise)

    def test_several_prompts_in_one_request(self, triton: LiveTriton, name: str) -> None:
        prompts = list(self.prompts[:4])
        alone = self._answers_alone(triton, name, prompts)
        answers = self._generate(triton, name, prompts, max_tokens=16)
        together = [(a.text, a.finish_reason, a.output_tokens) for a in answers]
        promise = "each prompt of a request gets the answer that it gets alone"
        self._expect_each(prompts, alone, together, promise=promise, roles=ALL_ROLES)

    def test_requests_keep_their_own_lengths(self, triton: LiveTriton, name: str) -> None:
        self._needs_options(triton, name, "ignore_eos")
        lengths = list(range(1, len(self.prompts) + 1))
        answers = all_at_once(
            lambda job: self._generate(triton, name, job[0], max_tokens=job[1], ignore_eos=True),
            list(zip(self.prompts, lengths, strict=True)),
        )
        self._expect_each(
            self.prompts,
            [(length, "length") for length in lengths],
            [(answer.output_tokens, answer.finish_reason) for answer in answers],
            promise="with ignore_eos an answer has exactly the max_tokens of its request",
        )

    def test_the_same_seed_gives_the_same_text(self, triton: LiveTriton, name: str) -> None:
        self._needs_options(triton, name, "temperature", "seed")
        options: dict[str, Any] = {"max_tokens": 16, "temperature": 2.0}
        jobs = [(prompt, seed) for prompt in self.prompts for seed in (7, 8)]

        def sampled(job: tuple[str, int]) -> str:
            text: str = self._generate(triton, name, job[0], seed=job[1], **options).text
            return text

        alone = [sampled(job) for job in jobs]
        if alone[::2] == alone[1::2]:
            pytest.skip("another seed gives the same answers, so nothing can be seen")
        self._expect_each(
            [f"{prompt} (seed {seed})" for prompt, seed in jobs],
            alone,
            all_at_once(sampled, jobs),
            promise="the same seed gives the same text, whatever runs beside it",
        )

    def test_no_text_of_one_request_in_anothers_answer(self, triton: LiveTriton, name: str) -> None:
        """With echoed prompts, every answer starts with its own prompt and contains no other."""
        self._needs_options(triton, name, "exclude_input_in_output")
        prompts = [f"{prompt} marker-{index}x" for index, prompt in enumerate(self.prompts)]
        options = {"max_tokens": 8, "exclude_input_in_output": False}
        answers = all_at_once(lambda p: self._generate(triton, name, p, **options).text, prompts)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            others = [f"marker-{other}x" for other in range(len(prompts)) if other != index]
            if not answer.startswith(prompt) or any(marker in answer for marker in others):
                self._fail(
                    f"{prompt!r} and an answer to it",
                    answer,
                    promise="exclude_input_in_output=false starts an answer with its own prompt",
                    roles=("formatter", "batching"),
                )

    def test_one_bad_request_fails_alone(self, triton: LiveTriton, name: str) -> None:
        expected = self._answers_alone(triton, name, self.prompts)
        with ThreadPoolExecutor(2 * len(self.prompts)) as pool:
            good = [pool.submit(self._answer, triton, name, prompt) for prompt in self.prompts]
            bad = [
                pool.submit(self._refused, triton, name, prompt, names="max_tokens", max_tokens=-1)
                for prompt in self.prompts
            ]
        answers = [job.result() for job in good]
        promise = "a request that is refused does not affect others in the batch"
        self._expect_each(self.prompts, expected, answers, promise=promise)
        for job in bad:
            job.result()

    def test_a_full_context_does_not_disturb_neighbours(
        self, triton: LiveTriton, name: str
    ) -> None:
        """A prompt that leaves space for four tokens runs together with much longer answers."""
        self._needs_options(triton, name, "ignore_eos")
        self._needs_context(triton, name)
        message = self._refused(
            triton, name, self.prompts[0], names="context of ", max_tokens=2**31 - 1
        )
        context = int(message.split("context of ")[1].split(":")[0])
        full = self._prompt_of(context - 4, triton, name)
        options: dict[str, Any] = {"max_tokens": min(32, context // 4), "ignore_eos": True}
        alone = [self._generate(triton, name, p, **options).text for p in self.prompts[:3]]
        with ThreadPoolExecutor(4) as pool:
            filling = pool.submit(self._generate, triton, name, full, max_tokens=4, ignore_eos=True)
            others = [pool.submit(self._stream, triton, name, p, options) for p in self.prompts[:3]]
        together = [job.result()[0] for job in others]
        promise = "a prompt that fills the context does not affect others in the batch"
        self._expect_each(self.prompts[:3], alone, together, promise=promise)
        promise = "a prompt that leaves space for four tokens gets four"
        self._expect(4, filling.result().output_tokens, promise=promise)

    @pytest.mark.parametrize("max_tokens", [0, -1, 2**31 - 1, 2**40])
    def test_impossible_lengths_are_refused(
        self, triton: LiveTriton, name: str, max_tokens: int
    ) -> None:
        if max_tokens == 2**31 - 1:
            self._needs_context(triton, name)
        prompt = self.prompts[0]
        self._refused(triton, name, prompt, names="max_tokens", max_tokens=max_tokens)
        self._still_answers(triton, name)

    def test_an_empty_prompt_is_refused(self, triton: LiveTriton, name: str) -> None:
        self._refused(triton, name, "", names="empty")
        self._still_answers(triton, name)

    def test_a_prompt_over_the_context_is_refused(self, triton: LiveTriton, name: str) -> None:
        self._needs_context(triton, name)
        self._refused(triton, name, self.over_context, names="context", max_tokens=4)
        self._still_answers(triton, name)

    def test_bytes_that_are_not_text_are_refused(self, triton: LiveTriton, name: str) -> None:
        message = triton.send_bytes(name, b"good \xff bad", max_tokens=4)
        self._check_refusal(message, names="UTF-8")
        self._still_answers(triton, name)

    def test_an_unknown_model_is_reported(self, triton: LiveTriton, name: str) -> None:
        with pytest.raises(ModelNotReadyError):
            triton.client.generate(f"{name}-not-there", "Hello")
        self._still_answers(triton, name)

    def test_pieces_join_to_the_whole_answer(self, triton: LiveTriton, name: str) -> None:
        prompts = (*self.prompts, *_UNUSUAL)
        wholes = self._answers_alone(triton, name, prompts)
        streams = all_at_once(lambda p: self._stream(triton, name, p, {"max_tokens": 16}), prompts)
        self._expect_each(
            prompts,
            [(text, reason) for text, reason, _ in wholes],
            streams,
            promise="the pieces of a stream join to the whole answer",
            roles=(*TEXT, "batching"),
        )


class ConstrainedConformance(RecipeConformance):
    """The tests of :class:`RecipeConformance`, and tests of constrained answers.

    ``constrained`` is the option that constrains an answer.

    >>> class TestAcme(ConstrainedConformance):
    ...     recipe = "acme"
    ...     constrained = {"choice": ["yes", "no"]}
    ...
    ...     def fits(self, text: str) -> bool:
    ...         return text in ("yes", "no")
    """

    constrained: ClassVar[Mapping[str, Any]]

    def fits(self, text: str) -> bool:
        """Return whether an answer meets the constraint of ``constrained``."""
        raise NotImplementedError

    def test_constrained_answers_fit(self, triton: LiveTriton, name: str) -> None:
        """Answers meet the constraint, alone and batched with free ones, sampled and greedy."""
        sampled = {"temperature": 1.0, "seed": 7}
        for sampling in [{}, sampled] if sampled.keys() <= self._declared(triton, name) else [{}]:
            options = {**self.constrained, **sampling, "max_tokens": 24}

            def constrained(prompt: str, options: dict[str, Any] = options) -> tuple[str, Any]:
                answer = self._generate(triton, name, prompt, **options)
                return answer.text, answer.finish_reason

            alone = [constrained(prompt) for prompt in self.prompts]
            free = self._answers_alone(triton, name, self.prompts)
            for prompt, (text, _) in zip(self.prompts, alone, strict=True):
                self._check_form(prompt, text)
            with ThreadPoolExecutor(2 * len(self.prompts)) as pool:
                jobs = [pool.submit(constrained, prompt) for prompt in self.prompts]
                others = [pool.submit(self._answer, triton, name, p) for p in self.prompts]
            self._expect_each(
                self.prompts,
                alone,
                [job.result() for job in jobs],
                promise="a constrained answer is the same alone and in a batch",
                roles=("generator", "formatter", "batching"),
            )
            self._expect_each(
                self.prompts,
                free,
                [job.result() for job in others],
                promise="a constrained answer does not affect others in the batch",
                roles=("generator", "formatter", "batching"),
            )

    def test_pieces_of_a_constrained_answer_join_to_it(self, triton: LiveTriton, name: str) -> None:
        options = {**self.constrained, "max_tokens": 24}
        for prompt in self.prompts[:3]:
            self._check_form(prompt, self._stream(triton, name, prompt, options)[0])

    def _check_form(self, prompt: str, text: str) -> None:
        try:
            fits = self.fits(text)
        except ValueError:
            fits = False
        if not fits:
            self._fail(
                f"an answer to {prompt!r} that meets the constraint",
                text,
                promise=f"with {dict(self.constrained)} an answer meets the constraint",
                roles=("formatter", "generator"),
            )
