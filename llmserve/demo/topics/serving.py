"""Serving models: what the words mean, as a newcomer would hear them explained."""

from __future__ import annotations

from random import Random

from llmserve.demo.topics.choice import keep, pick, pick_index, some

TERMS = (
    (
        "A model server",
        "a program that keeps models loaded and answers requests",
        "Clients send text, and the server sends back what the model writes.",
        "It can serve many people at the same time.",
    ),
    (
        "A language model",
        "a program that guesses the next piece of a text",
        "It repeats this until the text is complete.",
        "Small models are quick, and large models know more.",
    ),
    (
        "A batch",
        "a group of requests that the model answers together",
        "Larger batches use the machine better.",
        "Each request still gets its own answer.",
    ),
    (
        "A token",
        "a small piece of text, often a word or a part of one",
        "Models read and write tokens instead of letters.",
        "A short sentence has about ten of them.",
    ),
    (
        "A tokenizer",
        "the part that turns text into tokens and back",
        "It belongs to one model and must never be mixed up.",
        "A good one keeps every space in its place.",
    ),
    (
        "Streaming",
        "the habit of sending each piece as soon as it is ready",
        "The reader sees the first word early.",
        "The last word arrives at the same time as before.",
    ),
    (
        "Latency",
        "the time that one request has to wait",
        "People notice it when it grows beyond a second.",
        "A shorter queue makes it smaller.",
    ),
    (
        "Throughput",
        "the number of tokens that a server writes each second",
        "Batching makes it larger.",
        "It is measured when many clients ask at once.",
    ),
    (
        "A prompt",
        "the text that a model is asked to continue",
        "A clear prompt gets a clear answer.",
        "It may be one word or a whole page.",
    ),
    (
        "A plugin",
        "a small package that adds a new way of serving",
        "It has the same rights as every other plugin.",
        "You can write one in an afternoon.",
    ),
    (
        "Triton",
        "a model server that runs many kinds of models",
        "It reads a model repository and loads what it finds there.",
        "It forms batches while requests are waiting.",
    ),
    (
        "A model repository",
        "a folder that holds one folder for each model",
        "Every model has a configuration and at least one version.",
        "The server reads it when it starts.",
    ),
)


def _lower(term: str) -> str:
    return term if term == "Triton" else term[0].lower() + term[1:]


def short(rng: Random) -> list[str]:
    """Explain one term in one to three sentences."""
    term, meaning, detail, more = TERMS[pick_index(rng, len(TERMS))]
    return [f"{term} is {meaning}.", *some(rng, [detail, more], 0.85)]


def long(rng: Random) -> list[str]:
    """Follow one request from the client to the answer, in eight to twelve sentences."""
    opening = pick(
        rng,
        ("Serving a language model is like running a small restaurant.", "Let us serve a model."),
    )
    return keep(
        rng,
        [
            opening,
            "A request comes in through the door and is written down.",
            "The tokenizer cuts the text into tokens.",
            "The request waits for a moment, so that others can join it.",
            "Then the whole batch goes to the model.",
            "The model reads all the prompts and writes one token for each.",
            "It does so again and again until every answer is complete.",
            "A finished answer leaves at once and makes room for the next one.",
            "The tokens are turned back into text.",
            "The client sees the words as they arrive.",
            "Nobody has to know how busy the kitchen is.",
            "That is all there is to it.",
        ],
        least=3,
    )


def question(rng: Random) -> tuple[str, str]:
    """Ask and answer what a term means."""
    term, meaning, detail, more = TERMS[pick_index(rng, len(TERMS))]
    asked = pick(
        rng,
        (f"What is {_lower(term)}?", f"Please explain what {_lower(term)} is."),
    )
    return asked, " ".join([f"{term} is {meaning}.", *some(rng, [detail, more], 0.85)])
