"""What every recipe promises, as tests: subclass, name the recipe, and pytest runs them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmserve import modelconfig
from llmserve.builder import build
from llmserve.errors import ModelNotReadyError, RequestRejectedError
from llmserve.manifest import hashes
from llmserve.testing.live import LiveTriton

PROMPTS = (
    "Programming in C++ is like",
    "The capital of France is",
    "Once upon a time",
    "Hello",
    "The weather in Seoul is cold, and",
    "A",
    "Where is the nearest",
    "I am going to the market because",
)


class RecipeConformance:
    """The suite. ``options`` are given to every build, ``context`` is the model's length.

    >>> class TestAcme(RecipeConformance):
    ...     recipe = "acme"
    ...     options = {"max_batch_size": 4}
    """

    recipe: ClassVar[str]
    model: ClassVar[str] = "demo"
    options: ClassVar[Mapping[str, Any]] = {}
    prompts: ClassVar[Sequence[str]] = PROMPTS
    over_context: ClassVar[str] = "word " * 5000

    @pytest.fixture
    def name(self, triton: LiveTriton) -> str:
        """Build the recipe into the live server once, and return the model's name."""
        return triton.build(self.recipe, self.model, **self.options)

    def test_building_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        """Same inputs, same bytes: no time, no path of this machine, no order by chance."""
        built = [
            build(self.recipe, self.model, output=tmp_path / name / "repo", **self.options)
            for name in ("one", "two")
        ]
        files = [hashes(result.folder) for result in built]
        assert files[0] == files[1]
        papers = [(result.folder / "llmserve.json").read_bytes() for result in built]
        assert papers[0] == papers[1]

    def test_configuration_speaks_the_contract(self, tmp_path: Path) -> None:
        """The configuration parses, is named like its folder and has the contract's tensors."""
        result = build(self.recipe, self.model, output=tmp_path, **self.options)
        config = modelconfig.read(result.folder)
        assert config.name == result.name
        assert "text_input" in {tensor.name for tensor in config.input}
        assert "text_output" in {tensor.name for tensor in config.output}
        assert config.parameters["llmserve.exchange"].string_value == result.manifest.exchange

    def test_answers_in_a_batch_equal_answers_alone(self, triton: LiveTriton, name: str) -> None:
        """Under greedy decoding an answer does not depend on what runs beside it."""
        alone = [self._ask(triton, name, prompt) for prompt in self.prompts]
        for _ in range(2):
            with ThreadPoolExecutor(len(self.prompts)) as pool:
                together = list(pool.map(lambda p: self._ask(triton, name, p), self.prompts))
            assert together == alone

    def test_several_prompts_in_one_request(self, triton: LiveTriton, name: str) -> None:
        """Each prompt of a request gets the answer that it gets alone."""
        prompts = list(self.prompts[:4])
        alone = [self._ask(triton, name, prompt) for prompt in prompts]
        answers = triton.client.generate(name, prompts, max_tokens=16)
        assert [(a.text, a.finish_reason, a.output_tokens) for a in answers] == alone

    def test_requests_keep_their_own_lengths(self, triton: LiveTriton, name: str) -> None:
        """Neighbours in a batch ask for different lengths and get them."""
        lengths = list(range(1, len(self.prompts) + 1))
        with ThreadPoolExecutor(len(lengths)) as pool:
            answers = list(
                pool.map(
                    lambda job: triton.client.generate(
                        name, job[0], max_tokens=job[1], ignore_eos=True
                    ),
                    zip(self.prompts, lengths, strict=True),
                )
            )
        assert [answer.output_tokens for answer in answers] == lengths
        assert {answer.finish_reason for answer in answers} == {"length"}

    def test_the_same_seed_gives_the_same_text(self, triton: LiveTriton, name: str) -> None:
        """A seeded answer is the same alone and beside others."""
        asked: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 7}
        alone = [triton.client.generate(name, p, **asked).text for p in self.prompts]
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            texts = list(
                pool.map(lambda p: triton.client.generate(name, p, **asked).text, self.prompts)
            )
        assert texts == alone

    def test_no_text_of_one_request_in_anothers_answer(self, triton: LiveTriton, name: str) -> None:
        """With the prompt echoed, every answer begins with its own prompt and holds no other."""
        prompts = [f"{prompt} marker-{index}x" for index, prompt in enumerate(self.prompts)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(
                pool.map(
                    lambda p: (
                        triton.client.generate(
                            name, p, max_tokens=8, exclude_input_in_output=False
                        ).text
                    ),
                    prompts,
                )
            )
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.startswith(prompt)
            others = [f"marker-{other}x" for other in range(len(prompts)) if other != index]
            assert not any(marker in answer for marker in others)

    def test_one_bad_request_fails_alone(self, triton: LiveTriton, name: str) -> None:
        """A request that cannot be served does not disturb those that it is batched with."""
        expected = [self._ask(triton, name, prompt) for prompt in self.prompts]
        with ThreadPoolExecutor(2 * len(self.prompts)) as pool:
            good = [pool.submit(self._ask, triton, name, prompt) for prompt in self.prompts]
            bad = [
                pool.submit(triton.client.generate, name, prompt, max_tokens=-1)
                for prompt in self.prompts
            ]
        assert [job.result() for job in good] == expected
        for job in bad:
            with pytest.raises(RequestRejectedError, match="max_tokens"):
                job.result()

    def test_a_full_context_does_not_disturb_neighbours(
        self, triton: LiveTriton, name: str
    ) -> None:
        """A prompt that leaves room for four tokens runs beside answers that need many more."""
        with pytest.raises(RequestRejectedError, match=r"context of \d+") as caught:
            triton.client.generate(name, self.prompts[0], max_tokens=2**31 - 1)
        context = int(str(caught.value).split("context of ")[1].split(":")[0])
        full = self._prompt_of(context - 4, triton, name)
        asked: dict[str, Any] = {"max_tokens": min(100, context // 4), "ignore_eos": True}
        alone = [triton.client.generate(name, p, **asked).text for p in self.prompts[:3]]
        with ThreadPoolExecutor(4) as pool:
            crowded = pool.submit(triton.client.generate, name, full, max_tokens=4, ignore_eos=True)
            beside = [pool.submit(self._stream, triton, name, p, asked) for p in self.prompts[:3]]
        assert [job.result() for job in beside] == alone
        assert crowded.result().output_tokens == 4

    @pytest.mark.parametrize("max_tokens", [0, -1, 2**31 - 1, 2**40])
    def test_impossible_lengths_are_refused(
        self, triton: LiveTriton, name: str, max_tokens: int
    ) -> None:
        """A length of nothing, less or too much gets an error that names max_tokens."""
        with pytest.raises(RequestRejectedError, match="max_tokens") as caught:
            triton.client.generate(name, self.prompts[0], max_tokens=max_tokens)
        self._is_one_line(str(caught.value))
        self._goes_on(triton, name)

    def test_an_empty_prompt_is_refused(self, triton: LiveTriton, name: str) -> None:
        """An empty prompt gets an error that says so."""
        with pytest.raises(RequestRejectedError, match="empty") as caught:
            triton.client.generate(name, "")
        self._is_one_line(str(caught.value))
        self._goes_on(triton, name)

    def test_a_prompt_over_the_context_is_refused(self, triton: LiveTriton, name: str) -> None:
        """A prompt that is too long gets an error that names the context's length."""
        with pytest.raises(RequestRejectedError, match="context") as caught:
            triton.client.generate(name, self.over_context, max_tokens=4)
        self._is_one_line(str(caught.value))
        self._goes_on(triton, name)

    def test_bytes_that_are_no_text_are_refused(self, triton: LiveTriton, name: str) -> None:
        """Bytes that are not UTF-8 get an error that says where."""
        message = triton.send_bytes(name, b"good \xff bad", max_tokens=4)
        assert message is not None
        assert "UTF-8" in message
        self._is_one_line(message)
        self._goes_on(triton, name)

    def test_an_unknown_model_is_said_to_be_unknown(self, triton: LiveTriton, name: str) -> None:
        """A name that the server does not have gets an error that names what it has."""
        with pytest.raises(ModelNotReadyError):
            triton.client.generate(f"{name}-not-there", "Hello")
        self._goes_on(triton, name)

    def test_pieces_join_to_the_whole_answer(self, triton: LiveTriton, name: str) -> None:
        """What streams is what comes in one piece, whatever is in it."""
        for prompt in self.prompts:
            pieces = list(triton.client.stream(name, prompt, max_tokens=16))
            whole = triton.client.generate(name, prompt, max_tokens=16)
            assert "".join(piece.text for piece in pieces) == whole.text
            assert pieces[-1].finish_reason == whole.finish_reason

    @staticmethod
    def _ask(triton: LiveTriton, name: str, prompt: str) -> tuple[str, str | None, int | None]:
        answer = triton.client.generate(name, prompt, max_tokens=16)
        return answer.text, answer.finish_reason, answer.output_tokens

    @staticmethod
    def _stream(triton: LiveTriton, name: str, prompt: str, asked: dict[str, Any]) -> str:
        return "".join(piece.text for piece in triton.client.stream(name, prompt, **asked))

    @staticmethod
    def _prompt_of(tokens: int, triton: LiveTriton, name: str) -> str:
        """Return a prompt of so many tokens, or a few less."""
        counts = [
            triton.client.generate(name, "so " * n, max_tokens=1).input_tokens or 0
            for n in (10, 20)
        ]
        each = (counts[1] - counts[0]) / 10
        return "so " * int(10 + (tokens - counts[0]) / each)

    @staticmethod
    def _is_one_line(message: str) -> None:
        assert "\n" not in message, f"an error is one line, not {message!r}"
        assert "Traceback" not in message

    def _goes_on(self, triton: LiveTriton, name: str) -> None:
        assert triton.client.generate(name, self.prompts[0], max_tokens=4).output_tokens
