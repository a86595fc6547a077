"""What people ask about a drawing, and what the demo model that sees answers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from plugins.tools.demo_trainer.vision.drawings import KINDS, Drawing

DESCRIBE = "What do you see?"
_DESCRIBE = (
    DESCRIBE, "What is this?", "What is in the picture?", "What's this?", "What can you see?",
    "Describe this image.", "Describe the drawing.", "What is drawn here?", "What did I draw?",
    "What does the image show?", "What is in this image?",
)  # fmt: skip
COUNT = "How many shapes are there?"
_COUNT = (
    COUNT, "How many things do you see?", "How many are there?", "How many shapes do you see?",
    "Count the shapes.", "How many things are there?",
)  # fmt: skip
COLOUR = "Which colour is it?"
_COLOUR = (
    COLOUR, "What colour is it?", "What color is it?", "Which color is it?", "What colour is this?",
    "Which colours do you see?", "What colors do you see?",
)  # fmt: skip
DIGIT = "Which digit is it?"
_KIND = (
    "Which shape is it?", "What shape is it?", "What shape is this?", "Which shapes are they?",
    DIGIT, "What digit is it?", "What digit is this?", "Which number is it?",
    "What number is it?", "What number is this?",
)  # fmt: skip
_BACKGROUND = (
    "Which colour is the background?", "What color is the background?",
    "What is the background colour?",
)  # fmt: skip
_IS = ("Is there {}?", "Do you see {}?", "Is it {}?")
_WHO = ("Who are you?", "What are you?", "What can you do?", "Hello", "Hi", "Hello!")

WITHOUT = "Show me a drawing of a shape or a digit."
_SELF = "I am a very small model. I see shapes, digits and colours in drawings."
_NUMBERS = ("no", "one", "two", "three")

Turn = tuple[str, str]


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeio8' else 'a'} {words}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def description(drawing: Drawing) -> str:
    """Return the answer to ``DESCRIBE``."""
    things = _listed([with_article(f"{each.colour} {each.kind}") for each in drawing.things])
    return f"I see {things} on {with_article(drawing.background)} background."


def count(drawing: Drawing) -> str:
    number = len(drawing.things)
    return f"There {'is' if number == 1 else 'are'} {_NUMBERS[number]}."


def colour(drawing: Drawing) -> str:
    if len(drawing.things) == 1:
        return f"It is {drawing.things[0].colour}."
    words = _listed([f"the {each.kind} is {each.colour}" for each in drawing.things])
    return f"{words[0].upper()}{words[1:]}."


def kind(drawing: Drawing) -> str:
    words = _listed([with_article(each.kind) for each in drawing.things])
    return f"{'It is' if len(drawing.things) == 1 else 'They are'} {words}."


def _varied(random: Random, questions: Sequence[str]) -> str:
    # The first is the most usual.
    question = questions[0] if random.random() < 0.3 else random.choice(questions)
    if random.random() < 0.2:
        question = question[0].lower() + question[1:]
    return question.rstrip("?.!") if random.random() < 0.15 else question


def turn(random: Random, drawing: Drawing, is_first: bool = False) -> Turn:
    """Return one question about a drawing, and its answer."""
    topic = random.random() * (1.6 if is_first else 1)
    if topic < 0.16:
        return _varied(random, _COUNT), count(drawing)
    if topic < 0.36:
        return _varied(random, _COLOUR), colour(drawing)
    if topic < 0.52:
        return _varied(random, _KIND), kind(drawing)
    if topic < 0.66:
        return _varied(random, _BACKGROUND), f"The background is {drawing.background}."
    if topic < 0.78:
        shown = [each.kind for each in drawing.things]
        named = random.choice(shown if random.random() < 0.5 else KINDS)
        asked = _varied(random, [random.choice(_IS).format(with_article(named))])
        if named in shown:
            return asked, f"Yes, there is {with_article(named)}."
        return asked, f"No, there is no {named}."
    if topic < 0.8:
        return _varied(random, _WHO), _SELF
    return _varied(random, _DESCRIBE), description(drawing)


def turn_without(random: Random) -> Turn:
    """Return a question without any drawing."""
    if random.random() < 0.4:
        return _varied(random, _WHO), _SELF
    return _varied(random, random.choice((_DESCRIBE, _COUNT, _COLOUR, _KIND))), WITHOUT
