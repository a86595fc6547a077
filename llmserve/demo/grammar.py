"""The text that the demo model is trained on, written from a seed.

A document is one to fifteen sentences on one subject. A subject is chosen first,
then a form, then each sentence; the facts about a subject never change, so that
the model's answers are steady. Conversations have the form that the chat template
renders. Where a document holds the mark ``GIVEN``, what stands before it is a prompt
that nobody could foresee, and training does not ask the model to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from llmserve.demo.topics import (
    animals,
    chat,
    daily,
    openings,
    places,
    programming,
    serving,
    stories,
    unfamiliar,
)

# How often each kind of document is written.
WEIGHTED: tuple[tuple[Callable[[Random], list[str]], int], ...] = (
    (programming.short, 10),
    (programming.other, 5),
    (programming.long, 5),
    (places.short, 10),
    (places.long, 4),
    (animals.short, 8),
    (animals.long, 4),
    (serving.short, 6),
    (serving.long, 2),
    (daily.weather, 5),
    (daily.food, 5),
    (daily.recipe, 3),
    (stories.story, 6),
    (stories.short, 3),
    (openings.short, 22),
    (unfamiliar.short, 12),
    (chat.plain, 14),
    (chat.conversation, 30),
)


def document(rng: Random) -> str:
    """Write one document with the given source of chance."""
    writers = [writer for writer, _ in WEIGHTED]
    weights = [weight for _, weight in WEIGHTED]
    return " ".join(rng.choices(writers, weights)[0](rng))


def documents(seed: int) -> Iterator[str]:
    """Write documents without end; the same seed writes the same ones.

    >>> first, again = documents(1), documents(1)
    >>> [next(first) for _ in range(9)] == [next(again) for _ in range(9)]
    True
    """
    rng = Random(seed)  # noqa: S311  (text, not secrets: it has to be the same every time)
    while True:
        yield document(rng)
