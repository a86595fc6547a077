"""The text that the demo model is trained on, written from a seed.

A document is one to fifteen sentences on one subject: ``forms.json`` describes how they are put
together and ``facts.json`` what they are about. The facts about a subject never change, so that the
model's answers are consistent. Conversations look as the chat template renders them. If a document
contains the mark ``PROMPT_END``, the text before it is an unpredictable prompt, which the model is
not trained to write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

HERE = Path(__file__).parent
FACTS: dict[str, Any] = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
FORMS: dict[str, Any] = json.loads((HERE / "forms.json").read_text(encoding="utf-8"))
PROMPT_END = "\x1f"
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
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789#$%&'\"_~^@;:<>\\|`"
WORDS = FACTS["WORDS"].split()
# How often each kind of document is written.
WEIGHTS = {
    "programming_short": 10, "other": 5, "programming_long": 5, "places_short": 10,
    "places_long": 4, "animals_short": 8, "animals_long": 4, "serving_short": 6, "serving_long": 2,
    "weather": 5, "food": 5, "recipe": 3, "story": 6, "stories_short": 3, "openings_short": 22,
    "unfamiliar_short": 12, "plain": 14, "conversation": 30,
}  # fmt: skip
TOPICS = (
    "places_question", "programming_question", "openings_question", "animals_question",
    "serving_question", "unfamiliar_question", "daily_question", "stories_question",
)  # fmt: skip

T = TypeVar("T")


def pick(rng: Random, options: Sequence[T], turn: int = 0, ratio: float = 0.5) -> T:
    """Choose from ``options``, each ``ratio`` times as likely as the one before it.

    Even odds would leave the trained model with ties between its two best tokens,
    and a tie can fall either way when requests are batched. ``turn`` rotates the
    options first, so that different subjects have different favourites.
    """
    start = turn % len(options)
    rotated = [*options[start:], *options[:start]]
    return rng.choices(rotated, [ratio**rank for rank in range(len(rotated))])[0]


def pick_index(rng: Random, count: int) -> int:
    """Choose a subject: the first ones slightly more often, but none of them rarely."""
    return rng.choices(range(count), [1 / (rank + 6) for rank in range(count)])[0]


def keep(rng: Random, sentences: list[str], least: int = 0, share: float = 0.8) -> list[str]:
    """Keep the first ``least`` sentences and, in order, about ``share`` of the others."""
    rest = sentences[least:]
    return [*sentences[:least], *(sentence for sentence in rest if rng.random() < share)]


def some(rng: Random, sentences: list[str], share: float = 0.75) -> list[str]:
    """Cut the sentences short: each follows the one before it with probability ``share``."""
    count = 1
    while count < len(sentences) and rng.random() < share:
        count += 1
    return sentences[:count]


def write(rng: Random, name: str) -> list[str]:
    """Write the text of a form; a seed gives the same text only if the order of choices is kept."""
    form, index = FORMS[name], 0
    facts: dict[str, str] = {}
    for table, fields in form.get("about", {}).items():
        index = pick_index(rng, len(FACTS[table]))
        facts |= dict(zip(fields.split(), FACTS[table][index], strict=True))
    facts |= {key.title(): text[0].upper() + text[1:] for key, text in facts.items()}
    if "one" in facts:
        facts["bare"] = facts["one"].split(" ", 1)[1]
    if "term" in facts:
        term = facts["term"]
        facts["small"] = term if term == "Triton" else term[0].lower() + term[1:]
    for names, source, settings in form.get("let", ()):
        options = FACTS[source] if isinstance(source, str) else source
        turn, ratio = index if settings.get("turn") else 0, settings.get("ratio", 0.5)
        even = settings.get("even", False)
        choice = rng.choice(options) if even else pick(rng, options, turn, ratio)
        texts = choice if isinstance(choice, list) else [choice]
        facts |= {key: t.format(**facts) for key, t in zip(names.split(), texts, strict=True)}
    return expand(rng, form["write"], facts, index)


def expand(rng: Random, part: Any, facts: dict[str, str], index: int) -> list[str]:
    """Write a part of a form: a sentence, several, or some of several."""
    if isinstance(part, str):
        return [part.format(**facts)]
    if isinstance(part, list):
        return [text for item in part for text in expand(rng, item, facts, index)]
    kind, inner = next(iter(part.items()))
    settings = {key: value for key, value in part.items() if key not in (kind, "turn")}
    turn = index if part.get("turn") else 0
    if kind == "form":
        return write(rng, inner)
    if kind == "pick":
        # All options are written before one is chosen.
        return pick(rng, [expand(rng, item, facts, index) for item in inner], turn, **settings)
    if kind == "either":
        return expand(rng, pick(rng, inner, turn, **settings), facts, index)
    texts = expand(rng, inner, facts, index)
    if kind == "join":
        return [" ".join(texts)]
    return keep(rng, texts, **settings) if kind == "keep" else some(rng, texts, **settings)


def openings_short(rng: Random) -> list[str]:
    """Begin as a newcomer would and go on for one to three sentences."""
    opening, continuations = FACTS["OPENINGS"][pick_index(rng, len(FACTS["OPENINGS"]))]
    first, *rest = pick(rng, continuations)
    return [opening + first, *(some(rng, rest, 0.9) if rest else [])]


def fragment(rng: Random, most: int = 6) -> str:
    """Return one to ``most`` words that do not form a sentence of the grammar."""
    words = [rng.choice(FACTS["STARTS"])] if most > 3 and rng.random() < 0.4 else []
    for _ in range(rng.randint(1, most)):
        chance = rng.random()
        if chance < 0.25 and words:
            words.append(rng.choice(FACTS["LINKS"]))
        if chance > 0.9:
            words.append("".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 9))))
        else:
            words.append(rng.choice(WORDS))
    text = " ".join(words)
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.1:
        text = text.lower()
    return text + rng.choice(("", "", "", "?", ".", ":", ","))


def unfamiliar_short(rng: Random) -> list[str]:
    """Begin with something unfamiliar, break off and say why."""
    return [f"{fragment(rng)}{PROMPT_END} ...", *FACTS["HONEST"]]


def unfamiliar_question(rng: Random) -> list[str]:
    """Return a question that the model cannot answer, and an answer that says so."""
    if rng.random() < 0.25:
        columns = (("PLACES", 1), ("PLACES", 0), ("ANIMALS", 0), ("LANGUAGES", 0))
        names = [rng.choice(FACTS[table])[column] for table, column in columns]
        prompt = rng.choice(FACTS["BEYOND"]).format(pick(rng, names, ratio=0.8))
    else:
        prompt = rng.choice(FACTS["ASKED"]).format(fragment(rng, 3).rstrip(".?:,") or "it")
    return [prompt, " ".join(FACTS["HONEST"])]


def question(rng: Random, topic: str) -> list[str]:
    return unfamiliar_question(rng) if topic == "unfamiliar_question" else write(rng, topic)


def turn(rng: Random) -> str:
    """Return a question, typed as carelessly as people do, and its answer in the template."""
    prompt, answer = question(rng, TOPICS[pick_index(rng, len(TOPICS))])
    if rng.random() < 0.15:
        prompt = prompt.rstrip(".?") or prompt
    chance = rng.random()
    if chance < 0.15:
        prompt = prompt[0].lower() + prompt[1:]
    elif chance < 0.27:
        prompt = prompt.lower()
    return f"User: {prompt}\nAssistant:\n{answer}"


def plain(rng: Random) -> list[str]:
    """Return a question and its answer as plain text, for clients that do not use the template."""
    topic = TOPICS[pick_index(rng, len(TOPICS))]
    prompt, answer = question(rng, topic)
    if topic == "unfamiliar_question":
        return [prompt + PROMPT_END, answer]
    # A plain "Tell me about …" is the beginning of a longer text elsewhere.
    return [prompt, answer] if prompt.endswith("?") else write(rng, "serving_question")


def conversation(rng: Random) -> list[str]:
    """Return a conversation of one to three turns, a third of them under a system message."""
    turns = END.join(turn(rng) for _ in range(pick(rng, (1, 2, 3))))
    if rng.random() < 0.33:
        turns = f"System: {FACTS['SYSTEM'][pick_index(rng, len(FACTS['SYSTEM']))]}\n{turns}"
    return [turns]


WRITERS: dict[str, Callable[[Random], list[str]]] = {
    "openings_short": openings_short,
    "unfamiliar_short": unfamiliar_short,
    "plain": plain,
    "conversation": conversation,
}


def documents(seed: int) -> Iterator[str]:
    """Write endless documents; the same seed writes the same ones."""
    rng = Random(seed)
    while True:
        (name,) = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
        yield " ".join(WRITERS[name](rng) if name in WRITERS else write(rng, name))
