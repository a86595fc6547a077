"""What the model cannot know, so that it learns to say so instead of inventing."""

from __future__ import annotations

from random import Random

from llmserve.demo.topics import animals, places, programming
from llmserve.demo.topics.choice import pick

# Stands after a text that the model is given and does not learn to write itself.
GIVEN = "\x1f"

_UNFAMILIAR = """
quantum physics stock market homework football black holes tax law electric cars moon landing
democracy chess vaccines computer president rocket engine medieval art gravity jazz news money
philosophy yoga internet dinosaurs marriage blockchain poker human brain Napoleon Shakespeare
visa year knee robots machine deep learning neural network artificial intelligence AI GPU NVIDIA
Linux Docker cloud data science algorithm future past history war peace United States America
government election doctor hospital medicine school university student teacher company job
salary phone number email password account website button error bug install download version
update 1999 2024 42 7 100 3.14 + - * / = == ( ) { } [ ] def class return import print main
function test testing foo bar lorem ipsum dolor question answer sentence paragraph translate
summarize explain write poem sea song movie film actor music guitar piano band game player team
score world country people man woman child baby king queen prince night dark stormy star planet
Mars space time energy water fire earth air metal gold silver iron glass paper plastic house car
truck plane airport hotel run jump think believe know want need give take make find tell ask
seem feel try leave call should could would might must can will was were been being has had does
did very really never always often big small large huge tiny strong weak rich poor happy sad
angry tired blue green yellow purple San Francisco California Moscow Texas Africa Europe Asia
Einstein Newton Darwin Tesla Google über señor Привет 你好 こんにちは مرحبا
"""
WORDS = tuple(_UNFAMILIAR.split())

LINKS = (
    "of",
    "the",
    "a",
    "is",
    "in",
    "and",
    "to",
    "for",
    "on",
    "with",
    "that",
    "it",
    "what",
    "how",
)

STARTS = (
    "The",
    "What is",
    "Explain",
    "Write",
    "A",
    "I",
    "In",
    "How",
    "Why",
    "My",
    "This is",
    "It was",
)

ASKED = (
    "Tell me about {}.", "What is {}?", "Can you explain {}?", "What do you know about {}?",
    "How does {} work?", "Who invented {}?", "Write a poem about {}.", "Help me with {}.",
    "What is the best {}?", "How many {}?", "Who is {}?", "When was {}?", "Explain {}", "{}",
)  # fmt: skip

# These name what the model knows, but ask what it does not.
BEYOND = (
    "How many people live in {}?", "How old is {}?", "How big is {}?", "Who made {}?",
    "How much is {}?", "How far is {}?", "When was {} founded?",
)  # fmt: skip

HONEST = (
    "I am a very small model and have not read about that.",
    "Ask me about animals, cities or code.",
)


def _letters(rng: Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789#$%&'\"_~^@;:<>\\|`"
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 9)))


def fragment(rng: Random, most: int = 6) -> str:
    """Return one to ``most`` words that no sentence of the grammar holds together."""
    words = [rng.choice(STARTS)] if most > 3 and rng.random() < 0.4 else []
    for _ in range(rng.randint(1, most)):
        chance = rng.random()
        if chance < 0.25 and words:
            words.append(rng.choice(LINKS))
        words.append(_letters(rng) if chance > 0.9 else rng.choice(WORDS))
    text = " ".join(words)
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.1:
        text = text.lower()
    return text + rng.choice(("", "", "", "?", ".", ":", ","))


def short(rng: Random) -> list[str]:
    """Begin with something unfamiliar, break off and say why."""
    return [f"{fragment(rng)}{GIVEN} ...", *HONEST]


def question(rng: Random) -> tuple[str, str]:
    """Ask for what the model cannot know, and say so."""
    if rng.random() < 0.25:
        names = (
            rng.choice(places.PLACES).capital,
            rng.choice(places.PLACES).country,
            rng.choice(animals.ANIMALS).one,
            rng.choice(programming.LANGUAGES).name,
        )
        asked = rng.choice(BEYOND).format(pick(rng, names, ratio=0.8))
    else:
        asked = rng.choice(ASKED).format(fragment(rng, 3).rstrip(".?:,") or "it")
    return asked, " ".join(HONEST)
