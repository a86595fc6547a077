"""Conversations, in the very form that the chat template renders."""

from __future__ import annotations

from random import Random

from llmserve.demo.topics import (
    animals,
    daily,
    openings,
    places,
    programming,
    serving,
    stories,
    unfamiliar,
)
from llmserve.demo.topics.choice import pick, pick_index

END = "<|endoftext|>"

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{{ 'System: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\\n' }}"
    "{% else %}"
    "{{ 'Assistant:\\n' + message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)

SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in short sentences.",
    "You are a poet.",
    "Answer politely.",
)

TOPICS = (
    places.question,
    programming.question,
    openings.question,
    animals.question,
    serving.question,
    unfamiliar.question,
    daily.question,
    stories.question,
)


def exchange(rng: Random) -> tuple[str, str]:
    """Return one question, typed as carelessly as people do, and its answer."""
    asked, answer = TOPICS[pick_index(rng, len(TOPICS))](rng)
    if rng.random() < 0.15:
        asked = asked.rstrip(".?") or asked
    chance = rng.random()
    if chance < 0.15:
        asked = asked[0].lower() + asked[1:]
    elif chance < 0.27:
        asked = asked.lower()
    return asked, answer


def turn(rng: Random) -> str:
    """Return one exchange as the template renders it, less the end mark."""
    asked, answer = exchange(rng)
    return f"User: {asked}\nAssistant:\n{answer}"


def plain(rng: Random) -> list[str]:
    """Return a question and its answer as plain text, for those who leave the template out."""
    topic = TOPICS[pick_index(rng, len(TOPICS))]
    asked, answer = topic(rng)
    if topic is unfamiliar.question:
        return [asked + unfamiliar.GIVEN, answer]
    if not asked.endswith("?"):
        # A plain "Tell me about …" opens a longer text elsewhere.
        asked, answer = serving.question(rng)
    return [asked, answer]


def conversation(rng: Random) -> list[str]:
    """Return a conversation of one to three turns, a third of them under a system message."""
    turns = END.join(turn(rng) for _ in range(pick(rng, (1, 2, 3))))
    if rng.random() < 0.33:
        turns = f"System: {SYSTEM[pick_index(rng, len(SYSTEM))]}\n{turns}"
    return [turns]
