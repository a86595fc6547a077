"""Decides which sequences run, which wait, and what each step computes."""

from __future__ import annotations

import hashlib
import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.sampling import Sampler
from llmserve.runtime.engine.adapters import Adapters
from llmserve.runtime.engine.guessing import Chance
from llmserve.runtime.engine.pace import Pace
from llmserve.runtime.engine.pages import START, PagePool
from llmserve.runtime.engine.places import MOST_INTERRUPTIONS, PlaceInLine, TurnCount
from llmserve.runtime.engine.runner import Chunk, Embedded
from llmserve.runtime.engine.states import States
from llmserve.runtime.engine.warm import KEY_DIGEST_BYTES, WarmPages
from llmserve.runtime.protocols import Tokenizer

# A prompt whose log-probabilities are asked for has a row of logits for each token, which can be
# a megabyte.
_MOST_ROWS = 64
_MOST_FILLING = 0.1
"""The seconds that a step may read pages from disk for while answers wait for it."""


class ScheduledSequence:
    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        adapter: str = "",
        beginning: int = START,
    ) -> None:
        self.generation = generation
        self.place = PlaceInLine(generation.params.priority_class)
        self.adapter = adapter
        """The key of its adapter, if it has one."""
        self.beginning = beginning
        self.embedded: Sequence[Embedded] = generation.images or ()
        self._prompt_keys = _keys(generation.prompt_ids, self.embedded)
        self.sampler = None if generation.plain else Sampler(generation, tokenizer)
        self.chance = Chance()
        self.is_read = generation.cached_tokens is not None
        """Whether anything of it was computed; before that, all that it has was there already."""
        self.reset_pages()

    def reset_pages(self) -> None:
        self.pages: list[int] = []
        self.computed = 0
        self.published = 0
        self.last_content = self.beginning
        self.names: list[bytes] | None = None
        """What its published pages are called on disk, after its beginning; None if they are not
        kept there."""
        self.is_warm = False
        """Whether its next page may be on disk."""
        self.ahead: list[bytes] = []
        """What pages are called that are read from disk, and count once a state after one is."""
        self.warm_until = 0
        """Up to which token pages are looked for on disk."""
        self.state = 0
        self.stated = 0
        """After how many tokens its state was kept last, or read."""
        self.parts_at = 0
        """After how many tokens another sequence, which began alike, went on differently."""
        self.kept_answer: int | None = None
        """The content up to a border in its answer after which a copy of its state is kept."""

    @property
    def is_kept_longer(self) -> bool:
        """Whether what is computed of it outlives what is computed of others."""
        return self.generation.params.keep_longer

    @property
    def length(self) -> int:
        """The number of tokens in the prompt and the answer so far."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    @property
    def is_answering(self) -> bool:
        """Whether only the newest token is not computed yet."""
        return self.length - self.computed == 1

    def tokens(self, start: int, stop: int) -> list[int]:
        return self._part(self.generation.prompt_ids, start, stop)

    def keys(self, start: int, stop: int) -> list[int]:
        """Return what tells these tokens from others: of an image, more than they do."""
        return self._part(self._prompt_keys, start, stop)

    def embedded_in(self, start: int, stop: int) -> Sequence[Embedded]:
        return [each for each in self.embedded if each.start < stop and start < each.stop]

    def whole_around(self, border: int) -> Embedded | None:
        """Return what has tokens before and after a border that see each other, if anything has."""
        around = (each for each in self.embedded if each.start < border < each.stop)
        return next((each for each in around if each.is_whole), None)

    def fewer_positions(self, start: int) -> int:
        """Return how many fewer positions than tokens take what is embedded and ends before one."""
        return sum(each.fewer for each in self.embedded if each.stop <= start)

    def _part(self, prompt: list[int], start: int, stop: int) -> list[int]:
        answer, length = self.generation.token_ids, len(prompt)
        if start >= length:
            return answer[start - length : stop - length]
        return prompt[start:stop] + answer[: max(0, stop - length)]


def _keys(ids: list[int], embedded: Sequence[Embedded]) -> list[int]:
    """Return the tokens of a prompt, with a number that no token has for each that is embedded."""
    if not embedded:
        return ids
    keys = [*ids]
    for each in embedded:
        digest = hashlib.blake2b(each.digest, digest_size=KEY_DIGEST_BYTES).digest()
        first = int.from_bytes(digest, "big") << 32
        keys[each.start : each.stop] = [-1 - first - place for place in range(each.count)]
    return keys


def _rank(sequence: ScheduledSequence) -> tuple[bool, int, int]:
    return sequence.place.rank


class Scheduler:
    """Runs sequences by class and in order of arrival, as long as there are slots and pages.

    Sequences take pages as they grow. When none is left, the last of the running sequences returns
    to its place in the queue, and its tokens are recomputed later. So do those that run when one of
    a class above comes and finds no room.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_sequences: int,
        pace: Pace,
        share_prefixes: bool = True,
        adapters: Adapters | None = None,
        states: States | None = None,
        warm: WarmPages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self._clock = clock
        self._turns = TurnCount(max_sequences)
        self._arrivals = 0
        self._states = states
        self._warm = warm
        self.filling = 0.0
        """The seconds that the newest plan has read pages from disk for."""
        self.filled_tokens = 0
        """How many tokens were read from disk instead of computed."""
        self._adapters = adapters
        self.failed: list[tuple[Generation, Exception]] = []
        """Those whose adapter could not be loaded when it was their turn."""
        # A page says nothing of the state after it.
        self.share_prefixes = share_prefixes and (states is None or states.are_copied)
        self.max_sequences = max_sequences
        self.pace = pace
        self.waiting: list[ScheduledSequence] = []
        self.running: list[ScheduledSequence] = []
        """Both in the order in which they go."""

    def add(self, sequence: ScheduledSequence) -> None:
        """Have a sequence wait for its turn."""
        self._arrivals += 1
        sequence.place.arrival = self._arrivals
        self._wait(sequence)

    def next_singles(self) -> list[ScheduledSequence]:
        """Admit what has space, and return the sequences that are answering."""
        self._admit()
        return [sequence for sequence in self.running if sequence.is_answering]

    def plan(
        self, guesses: Mapping[ScheduledSequence, list[int]] = MappingProxyType({})
    ) -> list[tuple[ScheduledSequence, Chunk]]:
        """Return the newest token of every running sequence and guesses of what follows it, and
        pieces of sequences with several uncomputed tokens: new prompts, and runs of tokens that a
        constraint forced."""
        self._admit()
        now = self._clock()
        self._keep_late(now)
        plan: list[tuple[ScheduledSequence, Chunk]] = []
        answers_wait = any(each.is_answering for each in self.running)
        most = budget = self.pace.tokens(answers_wait=answers_wait)
        self.filling = 0.0
        # Growing requeues only sequences at the end, which are not planned yet.
        for sequence in self.running:
            if sequence.is_answering:
                if self._grow(sequence):
                    chunk = self._chunk(sequence, sequence.length)
                    if guessed := self._with_space(sequence, guesses.get(sequence, [])):
                        ids, rows = chunk.ids + guessed, 1 + len(guessed)
                        chunk = replace(chunk, ids=ids, rows=rows)
                    plan.append((sequence, chunk))
            elif budget <= 0:
                # The prompts of classes above are read first.
                sequence.place.wait(now)
            elif self._grow(sequence):
                sequence.place.go_on(now)
                if sequence.is_warm and not self._fill(sequence, answers_wait=answers_wait):
                    continue
                every_row = sequence.generation.wants_prompt_logits
                limit = sequence.computed + (min(budget, _MOST_ROWS) if every_row else budget)
                stop = self._stop(sequence, limit, is_first=budget == most)
                if stop == sequence.computed:
                    # What comes next is read in one piece, for which the rest is too little.
                    sequence.place.wait(now)
                    continue
                sequence.is_read = True
                plan.append((sequence, self._chunk(sequence, stop)))
                budget -= len(plan[-1][1].ids)
        return sorted(plan, key=lambda item: not item[1].single)

    def _fill(self, sequence: ScheduledSequence, *, answers_wait: bool) -> bool:
        """Read the next pages of a sequence from disk, instead of computing them.

        Returns whether no more are there; with answers that wait, the rest comes in later steps.
        """
        began = time.perf_counter()
        while sequence.is_warm:
            sequence.is_warm = self._fill_page(sequence)
            if self._states is None or not sequence.is_warm:
                self._count_filled(sequence)
            if answers_wait and self.filling + time.perf_counter() - began > _MOST_FILLING:
                break
        self.filling += time.perf_counter() - began
        return not sequence.is_warm

    def _fill_page(self, sequence: ScheduledSequence) -> bool:
        """Read the next page of a sequence from disk; return whether it was there."""
        if self._warm is None or sequence.names is None:
            return False
        size, ahead = self.pool.page_size, sequence.ahead
        start = sequence.computed + len(ahead) * size
        if start + size > sequence.warm_until:
            return False
        keys = sequence.keys(start, start + size)
        name = next(self._warm.names((ahead or sequence.names)[-1], keys))
        if not self._warm.fill(name, sequence.pages[sequence.published + len(ahead)]):
            return False
        ahead.append(name)
        return True

    def _count_filled(self, sequence: ScheduledSequence) -> None:
        """Count the pages that were read from disk as computed: with states, up to the last one
        after which the state is there."""
        ahead = sequence.ahead
        while ahead and self._states is not None and self._warm is not None:
            if self._warm.fill_state(ahead[-1], sequence.state):
                break
            ahead.pop()
        if not ahead:
            return
        tokens = len(ahead) * self.pool.page_size
        ahead.clear()
        self.filled_tokens += tokens
        sequence.stated = sequence.computed + tokens
        self.mark_computed(sequence, sequence.stated)
        if not sequence.is_read:
            sequence.generation.cached_tokens = sequence.computed

    def _stop(self, sequence: ScheduledSequence, limit: int, *, is_first: bool) -> int:
        """Return where the next piece of a prompt ends: at a border where its state is kept, and
        never among tokens that see each other.

        If there are more of these than the limit allows, it ends after them in a step that reads no
        other prompt before, and in others where it begins.
        """
        start, length = sequence.computed, sequence.length
        stop = min(length, limit)
        if (whole := sequence.whole_around(stop)) is not None:
            if whole.start <= start and not is_first:
                return start
            stop = whole.start if whole.start > start else whole.stop
        if self._states is None or not self.share_prefixes:
            return stop
        size = self.pool.page_size
        # The first is where others may part from it as well; the last is the longest that is of
        # use to the same prompt.
        for border in (sequence.parts_at, min(stop, length - 1) // size * size):
            if start < border <= stop and sequence.whole_around(border) is None:
                return border
        return stop

    def _with_space(self, sequence: ScheduledSequence, guesses: list[int]) -> list[int]:
        """Return the guesses that there is space for without taking any from others."""
        wanted = self.pool.pages_for(sequence.length + len(guesses))
        while len(sequence.pages) < wanted and self.pool.available > len(self.running):
            if (page := self._take(sequence)) is None:
                break
            sequence.pages.append(page)
        return guesses[: len(sequence.pages) * self.pool.page_size - sequence.length]

    def _chunk(self, sequence: ScheduledSequence, stop: int) -> Chunk:
        start = sequence.computed
        every_row = sequence.generation.wants_prompt_logits
        # The next token can be chosen only after the newest one.
        rows = stop - start if every_row else int(stop == sequence.length)
        return Chunk(
            sequence.tokens(start, stop),
            start,
            sequence.pages,
            rows,
            sequence.adapter,
            sequence.state,
            sequence.embedded_in(start, stop),
            sequence.fewer_positions(start),
        )

    def mark_computed(self, sequence: ScheduledSequence, stop: int) -> None:
        """Record that the tokens before ``stop`` are in the cache, and let other sequences share
        the pages that are full."""
        size = self.pool.page_size
        sequence.computed = stop
        while (start := sequence.published * size) + size <= stop:
            keys = tuple(sequence.keys(start, start + size))
            page = sequence.pages[sequence.published]
            sequence.last_content = self.pool.publish(page, sequence.last_content, keys)
            sequence.published += 1
            self._keep(sequence, [page], keys)
        if sequence.published * size == stop:
            self._keep_state(sequence)

    def _keep(self, sequence: ScheduledSequence, pages: list[int], keys: Sequence[int]) -> None:
        """Have the next full pages of a sequence written to disk, if they are not there."""
        if self._warm is None or sequence.names is None:
            return
        names = self._warm.names(sequence.names[-1], keys)
        for page, name in zip(pages, names, strict=True):
            sequence.names.append(name)
            self._warm.keep(name, page)

    def _keep_state(self, sequence: ScheduledSequence) -> None:
        """Keep a copy of the state of a sequence at a border; in its answer, only of the newest."""
        if self._states is None or not self.share_prefixes:
            return
        content, longer = sequence.last_content, sequence.is_kept_longer
        self._states.keep(sequence.state, content, sequence.kept_answer, longer=longer)
        if sequence.computed > len(sequence.generation.prompt_ids):
            # On disk, it is kept when the sequence ends.
            sequence.kept_answer = content
        else:
            self._write_state(sequence, sequence.state)

    def _write_state(self, sequence: ScheduledSequence, state: int) -> None:
        """Have the state after the last full page of a sequence written to disk."""
        if self._warm is not None and sequence.names is not None:
            stop = sequence.published * self.pool.page_size
            self._warm.keep_state(sequence.names[-1], state, stop - sequence.stated)
            sequence.stated = stop

    def pass_failed(self) -> None:
        """Begin again with all sequences whose states may be of a pass that failed."""
        while self._states is not None and self.running:
            self._requeue_last()

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a running or waiting sequence; its pages are free at once."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def _admit(self) -> None:
        now = self._clock()
        while self.waiting:
            sequence, is_late = self._next(now)
            while not self._begin(sequence, keep=is_late):
                if not self._interrupt_for(sequence, is_late=is_late):
                    return
            self._turns.begin(is_late=is_late)

    def _next(self, now: float) -> tuple[ScheduledSequence, bool]:
        """Return whose turn it is, and whether it has waited too long for those above it."""
        first, last = self.waiting[0], self.waiting[-1]
        is_mixed = first.place.number != last.place.number and not first.place.is_kept
        if is_mixed and self._turns.is_of_late and self._may_keep():
            late = [each for each in self.waiting if each.place.is_late(now)]
            longest = max(late, key=lambda each: each.place.total(now), default=first)
            if longest.place.number != first.place.number:
                return longest, True
        # While none of a class above waits, the next may come before it has got anywhere.
        was_interrupted = first.place.interruptions >= MOST_INTERRUPTIONS
        return first, was_interrupted and not first.place.is_kept and self._may_keep()

    def _may_keep(self) -> bool:
        """Return whether one more may keep its place."""
        kept = sum(each.place.is_kept for each in (*self.running, *self.waiting))
        return self._turns.has_room(kept)

    def _keep_late(self, now: float) -> None:
        """Have one keep its place that runs, and was not read for too long for those above it."""
        above = min((each.place.number for each in self.running), default=0)
        late = [
            each
            for each in self.running
            if each.place.since is not None
            and each.place.number > above
            and not each.place.is_kept
            and each.place.is_late(now)
        ]
        if late and self._may_keep():
            longest = max(late, key=lambda each: each.place.total(now))
            self.running.remove(longest)
            longest.place.is_kept = True
            insort(self.running, longest, key=_rank)

    def _interrupt_for(self, sequence: ScheduledSequence, *, is_late: bool) -> bool:
        """Have one of a class below wait instead; return whether there was any.

        For one that has waited too long, it may be of the same class: the classes above would have
        to wait for its end as well.
        """
        last = self.running[-1].place if self.running else None
        if last is None or last.is_kept or last.number < sequence.place.number + (not is_late):
            return False
        self._requeue_last()
        last.interruptions += 1
        return True

    def _begin(self, sequence: ScheduledSequence, *, keep: bool) -> bool:
        """Have a waiting sequence run if there is room for it; return whether it waits no more.

        With ``keep``, it keeps its place then.
        """
        if len(self.running) >= self.max_sequences:
            return False
        # The last token is always computed: the next one is chosen from its logits.
        keys = sequence.keys(0, sequence.length - 1)
        if sequence.generation.wants_prompt_logits or not self.share_prefixes:
            keys = []  # The cache does not keep logits.
        reusable = keys if self._states is None else self._with_state(sequence, keys)
        pages, content = self.pool.share(reusable, sequence.beginning)
        give_back = partial(self.pool.release, pages, longer=sequence.is_kept_longer)
        missing = self.pool.pages_for(sequence.length) - len(pages)
        # A page for each of the others to grow keeps it from being requeued at once.
        if missing + len(self.running) > self.pool.available:
            give_back()
            return False
        try:
            is_held = self._hold(sequence)
        except Exception as error:
            give_back()
            self.waiting.remove(sequence)
            self.failed.append((sequence.generation, error))
            return True
        if not is_held:
            give_back()
            return False
        self.waiting.remove(sequence)
        sequence.place.go_on(self._clock())
        sequence.place.is_kept |= keep
        insort(self.running, sequence, key=_rank)
        sequence.pages, sequence.published = pages, len(pages)
        sequence.last_content = content
        sequence.computed = len(pages) * self.pool.page_size
        if self._states is not None:
            sequence.stated = sequence.computed
            sequence.state = self._states.begin(
                content if pages else None, longer=sequence.is_kept_longer
            )
        if sequence.generation.cached_tokens is None:
            # Not again when it gets its pages back: these are of its own tokens.
            sequence.generation.cached_tokens = sequence.computed
        self._warm_up(sequence, keys)
        self._grow(sequence)
        return True

    def _warm_up(self, sequence: ScheduledSequence, tokens: list[int]) -> None:
        """Name the pages that a sequence shares, and have those after them looked for on disk, as
        far as these tokens go."""
        if self._warm is None or not self.share_prefixes:
            return
        adapter: str | None = ""
        if self._adapters is not None and sequence.adapter:
            name = sequence.generation.params.adapter or ""
            adapter = self._adapters.digest(name, sequence.adapter)
        if adapter is None:
            return
        salt = sequence.generation.params.cache_salt or ""
        sequence.names = [self._warm.beginning(adapter, salt)]
        self._keep(sequence, sequence.pages, tokens[: sequence.computed])
        sequence.warm_until = len(tokens)
        if self._states is not None:
            names = list(self._warm.names(sequence.names[-1], tokens[sequence.computed :]))
            while names and not self._warm.has_state(names[-1]):
                names.pop()
            sequence.warm_until = sequence.computed + len(names) * self.pool.page_size
        # What asks for the log-probabilities of its prompt has all of it computed.
        sequence.is_warm = sequence.warm_until > sequence.computed

    def _with_state(self, sequence: ScheduledSequence, reusable: list[int]) -> list[int]:
        """Return the keys after which a copy of the state is kept, as many as there are."""
        contents = self.pool.contents(reusable, sequence.beginning)
        sequence.parts_at = len(contents) * self.pool.page_size
        while contents and (self._states is None or contents[-1] not in self._states):
            contents.pop()
        return reusable[: len(contents) * self.pool.page_size]

    def _hold(self, sequence: ScheduledSequence) -> bool:
        """Have a sequence's adapter in memory; return whether there is space for it."""
        if self._adapters is None or not sequence.adapter:
            return True
        return self._adapters.hold(sequence.generation.params.adapter or "", sequence.adapter)

    def _grow(self, sequence: ScheduledSequence) -> bool:
        """Give a sequence pages for all its tokens, if necessary those of the last sequences.

        Returns whether the sequence still runs: it may have been the last itself.
        """
        while len(sequence.pages) < self.pool.pages_for(sequence.length):
            if (page := self._take(sequence)) is not None:
                sequence.pages.append(page)
                continue
            last = self._requeue_last()
            if last is sequence:
                return False
            last.place.interruptions += last.place.number > sequence.place.number
        return True

    def _take(self, sequence: ScheduledSequence) -> int | None:
        return self.pool.take(*sequence.pages[-1:], longer=sequence.is_kept_longer)

    def _requeue_last(self) -> ScheduledSequence:
        last = self.running.pop()
        self._release(last)
        self._wait(last)
        return last

    def _wait(self, sequence: ScheduledSequence) -> None:
        sequence.place.wait(self._clock())
        insort(self.waiting, sequence, key=_rank)

    def _release(self, sequence: ScheduledSequence) -> None:
        if self._states is not None and sequence.pages:
            if (copy := self._states.copy_of(sequence.kept_answer)) is not None:
                self._write_state(sequence, copy)
            self._states.end(sequence.state)
        longer = sequence.is_kept_longer
        self.pool.release(sequence.pages, longer=longer)
        if self._warm is not None and sequence.names is not None:
            self._warm.used(sequence.names[1:], longer=longer)
        sequence.reset_pages()
        if self._adapters is not None and sequence.adapter:
            self._adapters.release(sequence.adapter)
