"""Prompts that stay warm: what an engine has computed, a later one reads, and answers the same."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from llmserve.contract.names import MANIFEST, RENEWED, WARM, WARM_BYTES
from llmserve.runtime import Engine, Generation, PageRunner, PromptLookup, WarmPages, warm_pages
from llmserve.runtime.engine import scheduler
from llmserve.runtime.engine.page_files import PageFiles
from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from tests.recall import VOCABULARY, RecallingRunner, RecallRunner, embedded

PROMPT = [(7 * i) % VOCABULARY for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def engine_of(
    folder: Path | None,
    *,
    pages: int = 64,
    model: bytes = b"model",
    limit: int = 1_000_000,
    share: bool = True,
    chunk: int = 8,
    sequences: int = 4,
) -> Engine:
    runner = RecallRunner(pages)
    warm = WarmPages(runner, PageFiles(folder, limit), model, "model") if folder else None
    return Engine(
        runner,
        ByteTokenizer(),
        max_sequences=sequences,
        prefill_chunk=chunk,
        share_prefixes=share,
        guesser=PromptLookup(2),
        warm=warm,
    )


def finish(engine: Engine) -> None:
    while engine.busy:
        assert not engine.step().failed


def answered(engine: Engine, prompt: list[int], length: int = 6, **params: Any) -> Generation:
    """Return an answer, which is the same as that of an engine of which nothing is kept."""
    engine.admit(answer := generation(prompt, length, **params))
    finish(engine)
    (cold := engine_of(None)).admit(expected := generation(prompt, length, **params))
    finish(cold)
    assert answer.token_ids == expected.token_ids
    assert answer.prompt_logprobs == expected.prompt_logprobs
    return answer


def test_a_prompt_is_read_from_disk_after_a_restart(folder: Path) -> None:
    first = engine_of(folder)
    assert answered(first, PROMPT).cached_tokens == 0
    first.close()
    second = engine_of(folder)
    # The last token is computed: the answer begins with its scores.
    assert answered(second, PROMPT).cached_tokens == 36
    assert (second.tokens_computed, second.warm_tokens) == (4 + 5, 36)
    assert second.warm_bytes == 36 * 8
    assert answered(second, PROMPT).cached_tokens == 36
    assert second.warm_tokens == 36, "the second time, it is in memory"
    assert answered(second, [*PROMPT[:21], 3, 4]).cached_tokens == 20


def test_the_rest_of_what_is_in_memory_is_read_from_disk(folder: Path) -> None:
    answered(first := engine_of(folder), PROMPT)
    first.close()
    second = engine_of(folder)
    answered(second, PROMPT[:17])
    assert answered(second, PROMPT).cached_tokens == 36
    assert second.warm_tokens == 36


def test_an_answer_is_kept_as_well(folder: Path) -> None:
    answer = answered(first := engine_of(folder), PROMPT, 20)
    first.close()
    whole = [*PROMPT, *answer.token_ids]
    assert answered(engine_of(folder), [*whole, 1, 2, 3]).cached_tokens == 56


def test_another_engine_finds_pages_while_the_first_runs(folder: Path) -> None:
    first, second = engine_of(folder), engine_of(folder)
    answered(first, PROMPT)
    warm = first._warm
    assert warm is not None
    assert warm.flush()
    assert answered(second, PROMPT).cached_tokens == 36


def test_only_the_same_model_and_the_same_salt_find_them(folder: Path) -> None:
    answered(first := engine_of(folder), PROMPT, cache_salt="a")
    first.close()
    assert answered(engine_of(folder), PROMPT).cached_tokens == 0
    assert answered(engine_of(folder), PROMPT, cache_salt="b").cached_tokens == 0
    assert answered(engine_of(folder, model=b"other"), PROMPT, cache_salt="a").cached_tokens == 0
    assert answered(engine_of(folder), PROMPT, cache_salt="a").cached_tokens == 36


def test_pages_of_an_image_are_found_by_who_has_the_same_one(folder: Path) -> None:
    first = engine_of(folder)
    answered(first, PROMPT, images=[embedded(3, 30, 0)])
    first.close()
    found = [
        answered(engine_of(folder), PROMPT, images=images).cached_tokens
        for images in ([embedded(3, 30, 1)], [embedded(3, 29, 0)], [embedded(3, 30, 0)], None)
    ]
    assert found == [0, 0, 36, 0]


def test_a_salt_is_not_another_s_in_memory_either() -> None:
    engine = engine_of(None)
    found = [
        answered(engine, PROMPT, cache_salt=salt).cached_tokens
        for salt in (None, "a", "b", "a", None)
    ]
    assert found == [0, 0, 0, 36, 36]


def test_a_session_outlives_others_in_memory() -> None:
    engine = engine_of(None, pages=40, sequences=1)
    answered(engine, PROMPT, keep_longer=True)
    answered(engine, [1, *PROMPT])
    for n in range(20):
        answered(engine, [n, n, *PROMPT[:20]])
    assert (answered(engine, [1, *PROMPT]).cached_tokens or 0) < 36
    assert answered(engine, PROMPT, keep_longer=True).cached_tokens == 36


def test_a_session_outlives_others_on_disk_and_a_restart(folder: Path) -> None:
    limit = 40 * 4096
    first = engine_of(folder, limit=limit)
    answered(first, PROMPT, keep_longer=True, cache_salt="a")
    answered(first, PROMPT, cache_salt="b")
    for n in range(20):
        answered(first, [n, n, *PROMPT[:20]])
        warm = first._warm
        assert warm is not None
        assert warm.flush()
    first.close()
    # What is kept longer for one key is no other key's.
    assert answered(engine_of(folder, limit=limit), PROMPT, cache_salt="b").cached_tokens == 0
    assert answered(engine_of(folder, limit=limit), PROMPT).cached_tokens == 0
    assert answered(engine_of(folder, limit=limit), PROMPT, cache_salt="a").cached_tokens == 36


def test_a_flood_of_sessions_leaves_others_half_of_the_cache(folder: Path) -> None:
    engine = engine_of(folder, pages=48, limit=48 * 4096, sequences=1)
    answered(engine, PROMPT)
    for n in range(40):
        answered(engine, [n, n, *PROMPT[:20]], keep_longer=True, cache_salt=str(n))
        warm = engine._warm
        assert warm is not None
        assert warm.flush()
    assert answered(engine, PROMPT).cached_tokens == 36
    assert engine.warm_tokens == 0, "it was in memory"
    engine.close()
    assert answered(engine_of(folder, limit=48 * 4096), PROMPT).cached_tokens == 36


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed(folder: Path) -> None:
    answered(first := engine_of(folder), PROMPT)
    first.close()
    second = engine_of(folder)
    assert answered(second, PROMPT, prompt_logprobs=1).cached_tokens == 0
    assert second.warm_tokens == 0


def test_an_engine_that_shares_nothing_keeps_nothing(folder: Path) -> None:
    answered(first := engine_of(folder, share=False), PROMPT)
    first.close()
    assert [path.name for path in folder.iterdir()] == []


def test_a_damaged_page_and_those_after_it_are_computed(folder: Path) -> None:
    answered(first := engine_of(folder), PROMPT)
    first.close()
    pages = sorted((path for path in folder.iterdir() if path.name != "lock"), key=os.path.getmtime)
    content = bytearray(pages[-3].read_bytes())
    content[-1] ^= 1
    pages[-3].write_bytes(content)
    second = engine_of(folder)
    # The beginning of a text counts as used last.
    assert answered(second, PROMPT).cached_tokens == 8
    second.close()
    assert answered(engine_of(folder), PROMPT).cached_tokens == 36


def test_pages_of_another_size_are_computed(folder: Path) -> None:
    class Wide(RecallRunner):
        def read_page(self, page: int) -> bytes:
            return super().read_page(page) * 2

    runner = Wide(64)
    warm = WarmPages(runner, PageFiles(folder, 1_000_000), b"model", "model")
    answered(first := Engine(runner, ByteTokenizer(), max_sequences=1, warm=warm), PROMPT)
    first.close()
    assert answered(engine_of(folder), PROMPT).cached_tokens == 0


def test_a_sequence_that_lost_its_pages_reads_them_from_disk(folder: Path) -> None:
    engine = engine_of(folder, pages=18)
    many = [generation([n] * 9, 30) for n in (1, 2)]
    for each in many:
        engine.admit(each)
    finish(engine)
    for n, each in zip((1, 2), many, strict=True):
        (cold := engine_of(None)).admit(alone := generation([n] * 9, 30))
        finish(cold)
        assert each.token_ids == alone.token_ids
        assert each.cached_tokens == 0, "what it finds again of its own was not there before"


def test_pages_are_read_in_parts_while_others_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(first := engine_of(folder), PROMPT)
    first.close()
    monkeypatch.setattr(scheduler, "_MOST_FILLING", 0.0)
    second = engine_of(folder)
    second.admit(other := generation([1, 2, 3], 60))
    second.step()
    second.admit(answer := generation(PROMPT, 6))
    for pages in range(1, 10):
        before = len(other.token_ids)
        second.step()
        assert len(other.token_ids) > before
        assert (second.warm_tokens, answer.cached_tokens) == (4 * pages, 4 * pages)
        assert not answer.token_ids
    finish(second)
    assert answer.token_ids == answered(engine_of(None), PROMPT).token_ids


def test_a_disk_that_refuses_pages_stops_no_answer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(folder, limit=4095)
    with caplog.at_level(logging.WARNING):
        answered(engine, PROMPT)
        engine.close()
    assert [record.getMessage() for record in caplog.records] == [
        "llmserve: note: pages of model are not kept: the disk is nearly full, or a page is larger "
        "than all may be"
    ]
    assert {path.name for path in folder.iterdir()} <= {"lock"}


def test_what_comes_too_fast_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.runtime.engine.warm._MOST_WAITING", 0)
    answered(first := engine_of(folder), PROMPT)
    first.close()
    assert answered(engine_of(folder), PROMPT).cached_tokens == 0


# Models with states: a prompt goes on after a page only where the state after it is there too.


@pytest.fixture(params=[True, False], ids=["hybrid", "recurrent"])
def has_pages(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def with_states(
    folder: Path, *, has_pages: bool = True, copies: int = 50, pages: int = 64, chunk: int = 8
) -> Engine:
    runner = RecallingRunner(pages, most_copies=copies, has_pages=has_pages)
    warm = WarmPages(runner, PageFiles(folder, 1_000_000), b"model", "model")
    return Engine(runner, ByteTokenizer(), max_sequences=4, prefill_chunk=chunk, warm=warm)


def end(engine: Engine) -> None:
    """Close an engine when all is written, however busy the machine is."""
    warm = engine._warm
    assert warm is not None
    assert warm.flush(60)
    engine.close()


def kept_files(folder: Path) -> list[Path]:
    """Return what is kept, the end of a text first."""
    return sorted((path for path in folder.iterdir() if path.name != "lock"), key=os.path.getmtime)


def is_state(path: Path) -> bool:
    # The state is two numbers; a page has four, and both the same header.
    return path.stat().st_size < 4 * 8 + 120


def test_a_state_is_read_from_disk_after_a_restart(folder: Path, has_pages: bool) -> None:
    answered(first := with_states(folder, has_pages=has_pages), PROMPT)
    end(first)
    second = with_states(folder, has_pages=has_pages)
    assert answered(second, PROMPT).cached_tokens == 36
    assert (second.tokens_computed, second.warm_tokens) == (4 + 5, 36)
    assert second.warm_bytes == 36 * 8 * has_pages + 16
    assert answered(second, PROMPT).cached_tokens == 36
    assert second.warm_tokens == 36, "the second time, it is in memory"
    # States are kept after pieces of eight tokens.
    assert answered(with_states(folder, has_pages=has_pages), [*PROMPT[:22], 3]).cached_tokens == 16


def test_what_is_read_of_a_text_goes_on_from_what_is_in_memory(
    folder: Path, has_pages: bool
) -> None:
    answered(first := with_states(folder, has_pages=has_pages), PROMPT)
    end(first)
    second = with_states(folder, has_pages=has_pages)
    answered(second, PROMPT[:18])
    assert second.warm_tokens == 16
    assert answered(second, PROMPT).cached_tokens == 36
    assert second.warm_tokens == 16 + 20


def test_the_newest_state_of_an_answer_is_kept_when_it_ends(folder: Path, has_pages: bool) -> None:
    answer = answered(first := with_states(folder, has_pages=has_pages), PROMPT, 21)
    end(first)
    if not has_pages:
        # After 8, 16, 24, 32, 36 and 40 tokens of the prompt, and one of the answer.
        assert len(kept_files(folder)) == 7
    whole = [*PROMPT, *answer.token_ids]
    engine = with_states(folder, has_pages=has_pages)
    assert answered(engine, [*whole, 1, 2, 3]).cached_tokens == 60


def test_a_damaged_state_is_not_believed(folder: Path, has_pages: bool) -> None:
    for damage in ("a bit", "cut"):
        answered(first := with_states(folder, has_pages=has_pages), PROMPT)
        end(first)
        # From the end: of the answer, then after 40 and 36 tokens.
        state = [path for path in kept_files(folder) if is_state(path)][2]
        content = bytearray(state.read_bytes())
        if damage == "cut":
            content = content[:-1]
        else:
            content[-1] ^= 1
        state.write_bytes(content)
        second = with_states(folder, has_pages=has_pages)
        assert answered(second, PROMPT).cached_tokens == 32
        end(second)
        assert answered(with_states(folder, has_pages=has_pages), PROMPT).cached_tokens == 36


def test_a_prompt_goes_on_after_the_last_state_before_a_damaged_page(folder: Path) -> None:
    answered(first := with_states(folder), PROMPT)
    end(first)
    pages = [path for path in kept_files(folder) if not is_state(path)]
    # From the end: of the answer, then after 40, 36, 32, 28 and 24 tokens.
    pages[5].write_bytes(pages[5].read_bytes()[:-1])
    second = with_states(folder)
    assert answered(second, PROMPT).cached_tokens == 16
    end(second)
    assert answered(with_states(folder), PROMPT).cached_tokens == 36


def test_without_any_state_a_prompt_is_computed(folder: Path, has_pages: bool) -> None:
    answered(first := with_states(folder, has_pages=has_pages), PROMPT)
    end(first)
    for path in filter(is_state, kept_files(folder)):
        path.unlink()
    second = with_states(folder, has_pages=has_pages)
    assert answered(second, PROMPT).cached_tokens == 0
    assert second.warm_tokens == 0


def test_states_of_another_size_are_not_taken(folder: Path, has_pages: bool) -> None:
    class Wide(RecallingRunner):
        def read_state(self, state: int) -> bytes:
            return super().read_state(state) * 2

    runner = Wide(64, most_copies=50, has_pages=has_pages)
    warm = WarmPages(runner, PageFiles(folder, 1_000_000), b"model", "model")
    engine = Engine(runner, ByteTokenizer(), max_sequences=1, prefill_chunk=8, warm=warm)
    answered(engine, PROMPT)
    end(engine)
    assert answered(with_states(folder, has_pages=has_pages), PROMPT).cached_tokens == 0


def test_a_key_s_states_are_not_another_s(folder: Path, has_pages: bool) -> None:
    answered(first := with_states(folder, has_pages=has_pages), PROMPT, cache_salt="a")
    end(first)
    for salt, found in (("b", 0), (None, 0), ("a", 36)):
        engine = with_states(folder, has_pages=has_pages)
        assert answered(engine, PROMPT, cache_salt=salt).cached_tokens == found


def test_pages_before_a_state_are_read_in_parts_while_others_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(first := with_states(folder), PROMPT)
    end(first)
    monkeypatch.setattr(scheduler, "_MOST_FILLING", 0.0)
    second = with_states(folder)
    second.admit(other := generation([1, 2, 3], 60))
    second.step()
    second.admit(answer := generation(PROMPT, 6))
    for _ in range(9):
        before = len(other.token_ids)
        second.step()
        assert len(other.token_ids) > before
        # They are of no use until the state after them is there.
        assert (second.warm_tokens, answer.cached_tokens) == (0, 0)
        assert not answer.token_ids
    second.step()
    assert (second.warm_tokens, answer.cached_tokens) == (36, 36)
    finish(second)
    assert answer.token_ids == answered(engine_of(None), PROMPT).token_ids


def test_tokens_of_what_is_kept_are_counted_once(folder: Path, has_pages: bool) -> None:
    answered(first := with_states(folder, has_pages=has_pages), PROMPT)
    end(first)
    pages = PageFiles(folder, 0).pages()
    # With pages, those of the answer count as well.
    assert sum(page.tokens for page in pages) == 44 if has_pages else 36


def test_states_of_a_session_outlive_others_in_memory() -> None:
    runner = RecallingRunner(200, most_copies=12)
    engine = Engine(runner, ByteTokenizer(), max_sequences=1, prefill_chunk=64)
    answered(engine, PROMPT, keep_longer=True)
    answered(engine, [1, *PROMPT])
    for n in range(20):
        answered(engine, [n, n, *PROMPT[:20]])
    assert answered(engine, [1, *PROMPT]).cached_tokens == 0
    assert answered(engine, PROMPT, keep_longer=True).cached_tokens == 36


def test_a_flood_of_sessions_leaves_others_half_of_the_states() -> None:
    runner = RecallingRunner(400, most_copies=12)
    engine = Engine(runner, ByteTokenizer(), max_sequences=1, prefill_chunk=64)
    answered(engine, PROMPT)
    for n in range(40):
        answered(engine, [n, n, *PROMPT[:20]], keep_longer=True, cache_salt=str(n))
    assert answered(engine, PROMPT).cached_tokens == 36
    found = [
        answered(engine, [n, n, *PROMPT[:20]], keep_longer=True, cache_salt=str(n)).cached_tokens
        for n in (39, 0)
    ]
    assert found == [20, 0]


def test_one_copy_of_a_state_may_be_all_there_is_room_for() -> None:
    runner = RecallingRunner(64, most_copies=1)
    engine = Engine(runner, ByteTokenizer(), max_sequences=1, prefill_chunk=64)
    for n in range(3):
        answered(engine, [n, *PROMPT], keep_longer=bool(n % 2))
    assert len(runner.states) == 1


# The folder and the model that `serve` names.


@pytest.fixture
def version(tmp_path: Path) -> Path:
    version = tmp_path / "repository" / "m" / "1"
    (version / "adapters" / "a").mkdir(parents=True)
    (version / "weights").write_text("1")
    component = {"settings": {"path": "weights"}}
    manifest = {"name": "m", "components": {"generator": component}}
    (version.parent / MANIFEST).write_text(json.dumps(manifest))
    return version


def cached(version: Path, runner: PageRunner | None = None) -> int | None:
    """Return how many of a prompt's tokens a new process of the model finds."""
    runner = runner or RecallRunner(64)
    warm = warm_pages(runner, version)
    assert warm is not None
    engine = Engine(runner, ByteTokenizer(), max_sequences=1, warm=warm)
    found = answered(engine, PROMPT).cached_tokens
    engine.close()
    return found


def test_nothing_is_kept_unless_serve_says_where(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WARM, raising=False)
    assert warm_pages(RecallRunner(), version) is None


def test_a_model_finds_its_pages_until_its_files_change(
    version: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WARM, str(folder))
    monkeypatch.setenv(WARM_BYTES, "1000000")
    assert [cached(version), cached(version)] == [0, 36]
    (version / "adapters" / "a" / "new").write_text("an adapter")
    assert cached(version) == 36
    (version / RENEWED).write_text("")
    assert cached(version) == 36, "a reload changes nothing of it"
    (version / "weights").write_text("2")
    assert [cached(version), cached(version)] == [0, 36]

    class Other(RecallRunner):
        page_form = "another version of a library"

    assert cached(version, Other(64)) == 0
    recalling = [RecallingRunner(64, most_copies=50) for _ in range(2)]
    assert [cached(version, runner) for runner in recalling] == [0, 36]
    manifest = version.parent / MANIFEST
    manifest.write_text(manifest.read_text().replace("weights", "other"))
    assert cached(version) == 0


def test_weights_elsewhere_belong_to_a_model(
    version: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WARM, str(folder))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "weights").write_text("1")
    manifest = version.parent / MANIFEST
    manifest.write_text(manifest.read_text().replace('"weights"', json.dumps(str(elsewhere))))
    assert [cached(version), cached(version)] == [0, 36]
    (elsewhere / "weights").write_text("2")
    assert cached(version) == 0


class Bare:
    page_size, page_count, accepts_runs = 4, 16, True

    run = RecallRunner.run


class BareStates(RecallRunner):
    most_copies = 4

    copy, forget = RecallingRunner.copy, RecallingRunner.forget


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (RecallingRunner(), "no copies of its states are kept (state_mb)"),
        (BareStates(), "what computes it does not give out its states"),
        (Bare(), "what computes it does not give out its pages"),
    ],
)
def test_a_model_whose_prompts_cannot_stay_warm_says_so(
    runner: RecallRunner,
    reason: str,
    version: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(WARM, str(folder))
    with caplog.at_level(logging.WARNING):
        assert warm_pages(runner, version) is None
    assert caplog.messages == [f"llmserve: note: prompts of m do not stay warm: {reason}"]


def test_a_folder_that_cannot_be_used_stops_no_model(
    version: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder := tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setenv(WARM, str(folder))
    with caplog.at_level(logging.WARNING):
        assert warm_pages(RecallRunner(), version) is None
    assert caplog.messages == [
        f"llmserve: note: prompts of m do not stay warm: {folder} can be read by other users"
    ]
