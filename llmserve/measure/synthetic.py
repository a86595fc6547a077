"""Prompts made up to a given number of tokens."""

from __future__ import annotations

import random

from llmserve.measure.tokens import Counter

_TEXT = (
    "the a of to and in is that it was for on are with as they be at one have this from or had "
    "by hot word but what some we can out other were all there when up use your how said an each "
    "she which do their time if will way about many then them write would like so these her long "
    "make thing see him two has look more day could go come did number sound no most people my "
    "over know water than call first who may down side been now find any new work part take get "
    "place made live where after back little only round man year came show every good me give our "
    "under name very through just form great think say help low line differ turn cause much mean"
)
_TRIES = 64


def make_prompt(counter: Counter, tokens: int, draw: random.Random) -> str:
    """Make a prompt of so many tokens, by the model's own count; no two begin alike.

    The count is met exactly but where the tokenizer itself makes that impossible, as one that
    puts more special tokens around a text than were asked for; then it is as near as can be.
    """
    known = _TEXT.split()
    # Every word is at least a token, so these are enough; how many of them fit is searched for.
    words = [draw.choice(known).capitalize(), *draw.choices(known, k=max(0, tokens - 1))]
    fit, beyond = 1, len(words) + 1
    while beyond - fit > 1:
        middle = (fit + beyond) // 2
        if counter.count(" ".join(words[:middle])) <= tokens:
            fit = middle
        else:
            beyond = middle
    best = " ".join(words[:fit])
    for _ in range(_TRIES):
        if counter.count(best) == tokens:
            break
        longer = f"{best} {draw.choice(known)}"
        if counter.count(longer) <= tokens:
            best = longer
    return best


def draw_length(mean: float, deviation: float, draw: random.Random) -> int:
    """Draw a length around a mean, at least one.

    >>> draw_length(8, 0, random.Random(0))
    8
    """
    return max(1, round(draw.gauss(mean, deviation) if deviation else mean))
