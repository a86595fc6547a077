"""The tests of a recipe whose models answer with values, such as embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from llmserve.contract.options import TRUNCATE
from llmserve.contract.tasks import GENERATE
from llmserve.contract.tensors import TEXT_INPUT
from llmserve.errors import LLMServeError, RequestRejectedError, UsageError
from llmserve.repository import config as modelconfig
from llmserve.repository.repository import Model
from llmserve.testing.checks import ALL_ROLES, all_at_once
from llmserve.testing.conformance import BuildConformance
from llmserve.testing.live import LiveTriton

Row = Mapping[str, Any]


class ValueConformance(BuildConformance):
    """The tests of such a recipe. ``model`` is the model to build, ``options`` are those of builds.

    ``pair`` is the second text of each prompt, for a recipe that compares two. Numbers may differ
    by ``tolerance`` between a batch and a text alone.

    >>> class TestAcme(ValueConformance):
    ...     recipe = "acme-embeddings"
    ...     model = "./a-model"
    """

    pair: ClassVar[str | None] = None
    tolerance: ClassVar[float] = 1e-5
    over_context: ClassVar[str] = "word " * 5000

    def test_configuration_says_what_the_model_is_for(self, triton: LiveTriton, name: str) -> None:
        promise = "its config.pbtxt has the text, a task and the declared outputs"
        config = modelconfig.read(triton.repository / name)
        manifest = Model(triton.repository / name).intact()
        inputs = [entry.name for entry in config.input]
        self._expect(True, TEXT_INPUT.name in inputs, promise=promise, roles=ALL_ROLES)
        task = config.parameters["llmserve.task"].string_value
        self._expect(manifest and manifest.task, task, promise=promise, roles=("formatter",))
        if task in ("", GENERATE):
            self._fail("a task of values", task, promise=promise, roles=("formatter",))
        listed = {output["name"] for output in manifest.contract["outputs"]} if manifest else set()
        declared = {entry.name for entry in config.output}
        self._expect(listed, declared, promise=promise, roles=("formatter",))

    def test_values_in_a_batch_equal_values_alone(self, triton: LiveTriton, name: str) -> None:
        alone = [self._values(triton, name, [prompt])[0] for prompt in self.prompts]
        together = all_at_once(lambda p: self._values(triton, name, [p])[0], self.prompts)
        self._expect_close(alone, together, "a value is the same alone and in a batch")
        one_request = self._values(triton, name, self.prompts)
        self._expect_close(alone, one_request, "each text of a request has the value it has alone")

    def test_different_texts_have_different_values(self, triton: LiveTriton, name: str) -> None:
        first, second = self._values(triton, name, self.prompts[:2])
        if self._is_close(first, second):
            promise = "values depend on the text"
            self._fail(f"something else than of {self.prompts[0]!r}", second, promise=promise)

    def test_one_bad_request_fails_alone(self, triton: LiveTriton, name: str) -> None:
        expected = [self._values(triton, name, [prompt])[0] for prompt in self.prompts]
        jobs = [job for prompt in self.prompts for job in (prompt, "")]

        def ask(text: str) -> Any:
            if text:
                return self._values(triton, name, [text])[0]
            return self._refused_values(triton, name, text, names="empty")

        answers = [answer for answer in all_at_once(ask, jobs) if not isinstance(answer, str)]
        self._expect_close(expected, answers, "a refused request does not affect others")

    def test_a_text_over_the_limit_is_refused_or_cut(self, triton: LiveTriton, name: str) -> None:
        try:
            self._compute(triton, name, [self.over_context])
        except RequestRejectedError as error:
            self._check_refusal(str(error), names="tokens")
        else:
            pytest.skip("its generator has no context_length")
        if TRUNCATE.name in self._declared(triton, name):
            cut = self._values(triton, name, [self.over_context], truncate=True)
            self._expect(1, len(cut), promise="with truncate a text that is too long is cut")
        self._values(triton, name, self.prompts[:1])

    def test_bytes_that_are_not_text_are_refused(self, triton: LiveTriton, name: str) -> None:
        if self.pair is not None:
            pytest.skip("the first text alone is no request")
        message = triton.send_bytes(name, b"good \xff bad", prompt_only=True)
        self._check_refusal(message, names="UTF-8")
        self._values(triton, name, self.prompts[:1])

    def test_an_unknown_option_and_another_task_are_refused(
        self, triton: LiveTriton, name: str
    ) -> None:
        self._refused_values(triton, name, self.prompts[0], names="temperature", temperature=0.5)
        with pytest.raises(UsageError):
            triton.client.generate(name, self.prompts[0])

    def _compute(self, triton: LiveTriton, name: str, texts: Sequence[str], **options: Any) -> Any:
        pairs = None if self.pair is None else [self.pair] * len(texts)
        return triton.client.compute(name, list(texts), pairs=pairs, **options)

    def _values(
        self, triton: LiveTriton, name: str, texts: Sequence[str], **options: Any
    ) -> list[Row]:
        """Return the outputs of each text by name."""
        try:
            computed = self._compute(triton, name, texts, **options)
        except LLMServeError as error:
            self._error(f"computing values of {texts[0][:60]!r}", error)
        names = computed.outputs.keys()
        rows = zip(*computed.outputs.values(), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _refused_values(
        self, triton: LiveTriton, name: str, text: str, *, names: str, **options: Any
    ) -> str:
        try:
            computed = self._compute(triton, name, [text], **options)
        except RequestRejectedError as error:
            return self._check_refusal(str(error), names=names)
        return self._check_refusal(None, names=names, got=f"values: {computed.outputs}")

    def _expect_close(self, expected: Sequence[Row], got: Sequence[Row], promise: str) -> None:
        self._expect(len(expected), len(got), promise=f"{promise}: one each")
        for prompt, want, row in zip(self.prompts, expected, got, strict=True):
            if not self._is_close(want, row):
                self._fail(want, row, promise=f"{promise} (text {prompt!r})")

    def _is_close(self, first: Row, second: Row) -> bool:
        def close(a: Any, b: Any) -> bool:
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype == np.object_:
                return bool(a.tolist() == b.tolist())
            return a.shape == b.shape and bool(np.allclose(a, b, atol=self.tolerance, rtol=0))

        return first.keys() == second.keys() and all(close(first[k], second[k]) for k in first)
