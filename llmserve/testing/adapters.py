"""A test class for engines with adapters; a subclass says how a runner is made.

Each answer is that of the model with its own adapter merged, whatever runs beside.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmserve.runtime import Adapters, Engine, Generation, PageFiles, RequestError, WarmPages
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_adapters import merged, save_adapter
from llmserve.testing.tiny_models import VOCAB, make_model

NAMES = ("one", "two", "wide")
PROMPTS = [[(3 * i + 1) % VOCAB for i in range(length)] for length in (1, 5, 17, 40, 47)]
PLENTY = 1 << 30


@cache
def _reference(folder: Path, family: str, name: str) -> Any:
    model = make_model(family)
    return merged(model, folder / family / name) if name else model


@cache
def expected(folder: Path, family: str, name: str, prompt: tuple[int, ...]) -> list[int]:
    model = _reference(folder, family, name)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
    return [int(token) for token in output[0, len(prompt) :]]


def asked(engine: Engine, prompt: list[int], name: str, length: int = 24) -> Generation:
    request = generation(prompt, length, adapter=name or None)
    engine.admit(request)
    return request


def finish(engine: Engine, limit: int = 2000) -> None:
    """Run an engine until no generation is left; none may fail."""
    while engine.busy:
        assert not engine.step().failed
        limit -= 1
        assert limit, "the engine does not finish"


requests = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS), st.sampled_from(("", *NAMES)), st.integers(1, 24),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


def _without_b(weights: dict[str, torch.Tensor]) -> None:
    del weights[next(key for key in weights if "lora_B" in key)]


def _other_shape(weights: dict[str, torch.Tensor]) -> None:
    key = next(key for key in weights if "lora_B" in key)
    weights[key] = torch.zeros(7, 4)


def _other_module(weights: dict[str, torch.Tensor]) -> None:
    for kind in "AB":
        weights[f"base_model.model.lm_head.lora_{kind}.weight"] = torch.zeros(4, 4)


def _nan(weights: dict[str, torch.Tensor]) -> None:
    next(iter(weights.values()))[0, 0] = torch.nan


def _moved(folder: Path, other: Path) -> None:
    """Replace an adapter as `llmserve adapter` does."""
    folder.rename(folder.with_name(".old"))
    shutil.copytree(other, folder)


def _overwritten(folder: Path, other: Path) -> None:
    """Replace an adapter as `cp` does."""
    for file in other.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def _half_written(folder: Path, other: Path) -> None:
    """Stop amid the weights, when the facts are still those of before."""
    file = folder / "adapter_model.safetensors"
    content = (other / file.name).read_bytes()
    file.write_bytes(content[: len(content) // 2])


def _only_weights(folder: Path, other: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes((other / file.name).read_bytes())


class AdapterConformance:
    """The tests of a runner with adapters.

    ``targets`` are families of tiny models, ``llama`` among them, with the products to add to.
    """

    targets: ClassVar[dict[str, tuple[str, ...]]]

    def make_runner(self, family: str, tokens: int) -> Any:
        """Return a runner of a tiny model with a home for ``adapters``."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("adapters")
        for family, targets in cls.targets.items():
            model = make_model(family)
            save_adapter(folder / family / "one", model, targets=targets, seed=1)
            save_adapter(folder / family / "two", model, targets=targets[:1], seed=2, rank=2)
            save_adapter(
                folder / family / "wide", model, targets=targets, seed=3, rank=16, use_rslora=True
            )
        return folder

    def engine_with(
        self, folder: Path, family: str, *, budget: int = PLENTY, tokens: int = 512, most: int = 6,
        kept: Path | None = None, **options: Any,
    ) -> Engine:  # fmt: skip
        runner = self.make_runner(family, tokens)
        adapters = Adapters(folder, runner.adapters, budget)
        if kept is not None:
            files = PageFiles(kept, 1_000_000_000)
            options["warm"] = WarmPages(runner, files, family.encode(), family)
        return Engine(runner, ByteTokenizer(), max_sequences=most, adapters=adapters, **options)

    def test_all_in_one_step_answer_as_their_merged_models(self, home: Path) -> None:
        for family in self.targets:
            engine = self.engine_with(home / family, family)
            found = {
                (name, number): asked(engine, prompt, name)
                for number, prompt in enumerate(PROMPTS[1:4])
                for name in ("", *NAMES)
            }
            finish(engine)
            texts = set()
            for (name, number), request in found.items():
                wanted = expected(home, family, name, tuple(PROMPTS[1 + number]))
                assert request.token_ids == wanted, (family, name, number)
                texts.add(tuple(request.token_ids))
            assert len(texts) > len(PROMPTS[1:4]), "adapters change the answers"

    # Each plugin runs it in a class of its own.
    @settings(
        max_examples=15, deadline=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )  # fmt: skip
    @given(
        requests=requests, most=st.integers(1, 6),
        budget=st.sampled_from([1, 40_000, PLENTY]),
        prefill_chunk=st.sampled_from([1, 7, 64]), tokens=st.sampled_from([128, 416]),
    )  # fmt: skip
    def test_any_arrivals_within_any_budget(
        self,
        home: Path,
        requests: list[tuple[list[int], str, int, int]],
        most: int,
        budget: int,
        prefill_chunk: int,
        tokens: int,
    ) -> None:
        engine = self.engine_with(
            home / "llama", "llama", budget=budget, most=most,
            prefill_chunk=prefill_chunk, tokens=tokens,
        )  # fmt: skip
        found = []
        for prompt, name, length, pause in requests:
            found.append((prompt, name, length, asked(engine, prompt, name, length)))
            for _ in range(pause):
                assert not engine.step().failed
        finish(engine)
        for prompt, name, length, request in found:
            assert request.token_ids == expected(home, "llama", name, tuple(prompt))[:length]
        assert (engine.live, engine.waiting, engine.cache_used) == (0, 0, 0)

    @pytest.mark.long
    def test_64_adapters_within_a_budget_of_8_all_answer(self, tmp_path: Path) -> None:
        model = make_model("llama")
        for number in range(64):
            save_adapter(
                tmp_path / "a" / f"a{number}", model, targets=("q_proj",), seed=number, rank=2
            )
        engine = self.engine_with(tmp_path / "a", "llama", most=16)
        adapters: Any = engine._adapters
        asked(engine, PROMPTS[1], "a0", 1)
        finish(engine)
        adapters._budget = 8 * adapters.bytes
        chance = random.Random(0)  # noqa: S311
        found: list[tuple[str, Generation]] = []
        most = 0
        while engine.busy or len(found) < 200:
            # There are always others, of which some need no adapter, and some one that is loaded.
            while len(found) < 200 and engine.waiting < 12:
                favourite = chance.random() < 0.5
                name = chance.choice(["", "a0", "a1"]) if favourite else f"a{chance.randrange(64)}"
                found.append((name, asked(engine, PROMPTS[chance.randrange(5)], name, 6)))
            assert not engine.step().failed
            most = max(most, adapters.bytes)
            begun = [bool(request.token_ids) for _, request in found]
            overtaken = begun.index(False) if False in begun else len(begun)
            # Of those that run together, one with a long prompt may have its first token later.
            assert sum(begun[overtaken:]) < 16, "nobody waits while others come and go"
        assert most <= adapters._budget
        assert len({name for name, _ in found}) > 50
        for name in {name for name, _ in found}:
            reference = merged(model, tmp_path / "a" / name) if name else model
            for request in (request for each, request in found if each == name):
                ids = torch.tensor([request.prompt_ids + request.token_ids])
                with torch.inference_mode():
                    likeliest = reference(ids).logits[0].argmax(-1).tolist()
                start = len(request.prompt_ids) - 1
                assert likeliest[start:-1] == request.token_ids, name

    def test_a_beginning_is_not_shared_with_another_adapter(self, home: Path) -> None:
        engine = self.engine_with(home / "llama", "llama")
        prompt = PROMPTS[4]
        for name, cached in (("", 0), ("one", 0), ("two", 0), ("one", 32), ("", 32)):
            request = asked(engine, prompt, name)
            finish(engine)
            assert request.cached_tokens == cached
            assert request.token_ids == expected(home, "llama", name, tuple(prompt))

    def test_a_prompt_stays_warm_for_its_own_adapter(self, home: Path, tmp_path: Path) -> None:
        folder = tmp_path / "adapters"
        shutil.copytree(home / "llama", folder)
        prompt = PROMPTS[4]

        def restarted(name: str, files: str) -> int | None:
            engine = self.engine_with(folder, "llama", kept=tmp_path / "kept")
            request = asked(engine, prompt, name)
            finish(engine)
            engine.close()
            assert request.token_ids == expected(home, "llama", files, tuple(prompt))
            return request.cached_tokens

        found = [restarted(name, name) for name in ("", "one", "two", "one", "two", "")]
        assert found == [0, 0, 0, 32, 32, 32]
        (folder / "one").rename(tmp_path / "old")
        shutil.copytree(folder / "two", folder / "one")
        # It is the same as another now, whatever it is called.
        assert restarted("one", "two") == 32

    def test_adapters_come_go_and_change_while_others_run(self, home: Path, tmp_path: Path) -> None:
        folder = tmp_path / "adapters"
        shutil.copytree(home / "llama" / "one", folder / "a")
        engine = self.engine_with(folder, "llama")
        prompt = PROMPTS[4]
        before = asked(engine, prompt, "a")
        engine.step()
        # As `llmserve adapter` replaces one.
        shutil.copytree(home / "llama" / "two", folder / "b")
        (folder / "a").rename(tmp_path / "old")
        (folder / "b").rename(folder / "a")
        after = asked(engine, prompt, "a")
        finish(engine)
        assert before.token_ids == expected(home, "llama", "one", tuple(prompt))
        assert after.token_ids == expected(home, "llama", "two", tuple(prompt))
        assert after.cached_tokens == 0
        shutil.rmtree(folder / "a")
        with pytest.raises(RequestError, match="has no adapter 'a'") as caught:
            asked(engine, prompt, "a")
        assert (caught.value.code, caught.value.param) == ("adapter_not_found", "adapter")

    def test_a_model_lends_no_adapters_of_one_that_was_built_in_its_place(
        self, home: Path, tmp_path: Path
    ) -> None:
        """Theirs are for other weights, whatever their shapes."""
        folder = tmp_path / "adapters"
        shutil.copytree(home / "llama", folder)
        engine = self.engine_with(folder, "llama")
        before = asked(engine, PROMPTS[1], "one")
        folder.rename(tmp_path / "old")
        shutil.copytree(home / "llama", folder)
        with pytest.raises(RequestError, match="other adapters than when it was loaded") as caught:
            asked(engine, PROMPTS[1], "one")
        assert caught.value.code == "adapter_not_found"
        # As before, it is another that comes before its turn.
        ((failed, cause),) = engine.step().failed
        assert failed is before
        assert isinstance(cause, RequestError)

    @pytest.mark.parametrize(
        "name", ["../one", "one/../one", "", ".", "a" * 65, "x:y", "a\nb", "a,b"]
    )
    def test_no_name_leads_out_of_the_folder(self, home: Path, name: str) -> None:
        engine = self.engine_with(home / "llama" / "one", "llama")
        with pytest.raises(RequestError, match="has no adapter") as caught:
            engine.admit(generation([1], 1, adapter=name or " "))
        assert caught.value.code == "adapter_not_found"

    @pytest.mark.parametrize(
        ("change", "config", "words"),
        [
            (_without_b, {}, "do not fit each other or its rank 4"),
            (_other_shape, {}, "is it of this model"),
            (_other_module, {}, "adds to lm_head, which is not supported"),
            (_nan, {}, "are no numbers"),
            (None, {"r": 10**9}, "ranks from 1 to 512"),
            (None, {"lora_alpha": float("inf")}, "lora_alpha that is no number"),
            (None, {"lora_alpha": 10**400}, "lora_alpha that is no number"),
            # Finite by itself, and not as a scale of its weights.
            (None, {"lora_alpha": 1e300}, "are no numbers"),
            (None, {"use_dora": True}, "has DoRA"),
            (None, {"modules_to_save": ["lm_head"]}, "whole modules"),
            (None, {"peft_type": "IA3"}, "only LORA is supported"),
        ],
    )
    def test_one_that_is_not_for_the_model_fails_alone(
        self,
        change: Callable[[dict[str, torch.Tensor]], None] | None,
        config: dict[str, Any],
        words: str,
        home: Path,
        tmp_path: Path,
    ) -> None:
        shutil.copytree(home / "llama" / "one", tmp_path / "bad")
        shutil.copytree(home / "llama" / "one", tmp_path / "good")
        file, facts = tmp_path / "bad" / "adapter_model.safetensors", tmp_path / "bad"
        if change:
            weights = load_file(file)
            change(weights)
            save_file(weights, file)
        path = facts / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        engine = self.engine_with(tmp_path, "llama")
        good = asked(engine, PROMPTS[1], "good")
        try:
            bad = asked(engine, PROMPTS[1], "bad")
        except RequestError as error:
            found = error
        else:
            ((failed, cause),) = engine.step().failed
            assert failed is bad
            assert isinstance(cause, RequestError)
            found = cause
        assert found.code == "adapter_unusable"
        assert words in str(found)
        finish(engine)
        assert good.token_ids == expected(home, "llama", "one", tuple(PROMPTS[1]))

    @pytest.mark.parametrize("change", [_moved, _overwritten, _half_written, _only_weights])
    def test_one_that_changes_before_its_turn_fails_alone(
        self, change: Callable[[Path, Path], None], home: Path, tmp_path: Path
    ) -> None:
        """What was looked up is another rank's by the time that it is loaded."""
        for name in ("a", "b"):
            shutil.copytree(home / "llama" / "one", tmp_path / name)
        engine = self.engine_with(tmp_path, "llama")
        changed, beside = asked(engine, PROMPTS[2], "a"), asked(engine, PROMPTS[2], "b")
        change(tmp_path / "a", home / "llama" / "wide")
        ((failed, cause),) = engine.step().failed
        assert failed is changed
        assert isinstance(cause, RequestError)
        assert cause.code in ("adapter_not_found", "adapter_unusable")
        finish(engine)
        assert beside.token_ids == expected(home, "llama", "one", tuple(PROMPTS[2]))
        if change in (_moved, _overwritten):
            again = asked(engine, PROMPTS[2], "a")
            finish(engine)
            assert again.token_ids == expected(home, "llama", "wide", tuple(PROMPTS[2]))

    def test_one_of_the_same_shapes_that_comes_before_its_turn_is_not_taken_for_it(
        self, home: Path, tmp_path: Path
    ) -> None:
        save_adapter(tmp_path / "new", make_model("llama"), targets=self.targets["llama"], seed=9)
        shutil.copytree(home / "llama" / "one", tmp_path / "a")
        engine = self.engine_with(tmp_path, "llama")
        asked(engine, PROMPTS[2], "a")
        _moved(tmp_path / "a", tmp_path / "new")
        ((_, cause),) = engine.step().failed
        assert "was replaced while the request waited" in str(cause)
        assert not engine.busy

    def test_what_one_makes_infinite_reaches_no_other(self, home: Path, tmp_path: Path) -> None:
        shutil.copytree(home / "llama" / "one", tmp_path / "huge")
        file = tmp_path / "huge" / "adapter_model.safetensors"
        save_file({key: value * 1e30 for key, value in load_file(file).items()}, file)
        shutil.copytree(home / "llama" / "two", tmp_path / "two")
        engine = self.engine_with(tmp_path, "llama", tokens=96)
        for _ in range(3):
            beside = asked(engine, PROMPTS[2], "two", 12)
            asked(engine, PROMPTS[2], "huge", 12)
            plain = asked(engine, PROMPTS[2], "", 12)
            finish(engine)
            assert beside.token_ids == expected(home, "llama", "two", tuple(PROMPTS[2]))[:12]
            assert plain.token_ids == expected(home, "llama", "", tuple(PROMPTS[2]))[:12]
