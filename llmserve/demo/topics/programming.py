"""Programming languages: what it is like to write in one."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from llmserve.demo.topics.choice import keep, pick, pick_index, some


class Language(NamedTuple):
    """A programming language, what it is good for and what it is known for."""

    name: str
    use: str
    strength: str


LANGUAGES = (
    Language("C++", "games, browsers and fast servers", "speed"),
    Language("Python", "science, teaching and small tools", "clear code"),
    Language("Rust", "safe systems and small services", "safety"),
    Language("Java", "large business systems", "stability"),
    Language("Go", "servers that do many things at once", "simplicity"),
    Language("JavaScript", "pages that answer every click", "reach"),
    Language("C", "kernels and tiny machines", "closeness to the machine"),
    Language("TypeScript", "large web applications", "helpful types"),
    Language("Haskell", "compilers and careful proofs", "purity"),
    Language("Ruby", "friendly web sites", "elegance"),
    Language("Swift", "apps for phones", "comfort"),
    Language("Kotlin", "apps and quiet back ends", "brevity"),
    Language("Julia", "numbers and simulations", "fast mathematics"),
    Language("Lisp", "ideas that nobody has named yet", "flexibility"),
    Language("Lua", "games that need small scripts", "a small size"),
    Language("Perl", "text that arrives in strange shapes", "quick text work"),
    Language("Scala", "streams of data", "expressive power"),
    Language("SQL", "questions about tables", "short questions"),
)

SIMILES = (
    ("building a ship in a bottle", "Every small piece has its place, and patience is rewarded."),
    ("writing a letter to a friend", "You say what you mean, and the answer comes soon."),
    ("climbing with a careful guide", "The rope is always tied before you take a step."),
    ("moving into a big old house", "There is a room for everything, if you can find the door."),
    ("packing a light suitcase", "You take only what you need, and you arrive early."),
    ("cooking in a busy kitchen", "Many things boil at once, and somehow dinner is served."),
    ("walking on a narrow bridge", "The view is wonderful, but you should watch your feet."),
    ("drawing a map before a journey", "It takes a little longer, but you rarely get lost."),
    ("solving a quiet puzzle", "You think for an hour, and then one line is enough."),
    ("growing a small garden", "A little care each day brings flowers in the spring."),
    ("riding a new bicycle", "It feels light at once, and the hills seem lower."),
    ("tuning an old piano", "Small changes matter, and the right note is worth the wait."),
)

# Named without facts, so that a language nobody described here gets a simile too.
OTHERS = (
    "Fortran", "COBOL", "PHP", "Pascal", "Ada", "Erlang", "Elixir", "R", "Zig", "Dart", "Prolog",
    "assembly", "Basic", "Bash", "CUDA", "C#", "Clojure", "Groovy", "MATLAB", "OCaml", "Nim",
    "Objective-C", "Scheme", "Smalltalk", "Visual Basic", "English", "Mojo", "Triton", "F#",
)  # fmt: skip


def is_like(rng: Random, index: int) -> list[str]:
    """Return the two sentences that say what programming in a language is like."""
    simile, reason = pick(rng, SIMILES, turn=index, ratio=0.35)
    return [f"Programming in {LANGUAGES[index].name} is like {simile}.", reason]


def short(rng: Random) -> list[str]:
    """Say what programming in one language is like, in one to four sentences."""
    index = pick_index(rng, len(LANGUAGES))
    language = LANGUAGES[index]
    opening = is_like(rng, index)
    use = f"People use {language.name} for {language.use}."
    strength = f"The great strength of {language.name} is {language.strength}."
    form = pick(rng, ("simile", "use", "strength", "both"))
    if form == "simile":
        return [*opening, *some(rng, [use, strength], 0.6)]
    if form == "use":
        return some(rng, [use, strength, *opening], 0.8)
    if form == "strength":
        return some(rng, [strength, use], 0.7)
    return [f"{language.name} is a programming language.", use, *some(rng, [strength], 0.7)]


def other(rng: Random) -> list[str]:
    """Say what programming in a language without facts is like, in two or three sentences."""
    simile, reason = pick(rng, SIMILES, ratio=0.4)
    name = rng.choice(OTHERS)
    return [
        f"Programming in {name} is like {simile}.",
        reason,
        *keep(rng, ["You only have to begin."], 0, 0.3),
    ]


def long(rng: Random) -> list[str]:
    """Tell more about one language, in eight to thirteen sentences."""
    index = pick_index(rng, len(LANGUAGES))
    language = LANGUAGES[index]
    name = language.name
    teacher = pick(rng, ("my sister", "an old friend", "a kind teacher"), index)
    first = pick(rng, ("a small game", "a list of birds", "a clock"), index)
    opening = pick(rng, (f"Tell me about {name}.", f"Let me tell you about {name}."))
    return keep(
        rng,
        [
            opening,
            f"{name} is a programming language.",
            f"People use {name} for {language.use}.",
            f"The great strength of {name} is {language.strength}.",
            *is_like(rng, index),
            f"I learned it from {teacher}.",
            f"My first program was {first}.",
            "It did not work on the first day.",
            "On the second day I found the mistake, and it was a single letter.",
            "Since then I write a test before I write anything else.",
            "Start with something small and read your own code aloud.",
            "The rest comes with time.",
        ],
        least=6,
    )


def question(rng: Random) -> tuple[str, str]:
    """Ask and answer something about a programming language."""
    index = pick_index(rng, len(LANGUAGES))
    language = LANGUAGES[index]
    name = language.name
    like = " ".join(is_like(rng, index))
    use = f"People use {name} for {language.use}."
    strength = f"The great strength of {name} is {language.strength}."
    return pick(
        rng,
        (
            (f"What is programming in {name} like?", like),
            (f"What is {name}?", f"{name} is a programming language. {use}"),
            (f"What is {name} used for?", f"{use} {strength}"),
            (f"Tell me about {name}.", f"{name} is a programming language. {use} {like}"),
            (f"Should I learn {name}?", f"Yes, if you like it. {strength} {use}"),
        ),
        ratio=0.8,
    )
