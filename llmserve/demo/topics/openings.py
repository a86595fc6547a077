"""What people type first, and how it may go on."""

from __future__ import annotations

from random import Random

from llmserve.demo.topics.choice import pick, pick_index, some

# Each opening with its continuations; a continuation is a whole short document.
OPENINGS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "Hello",
        (
            (", and welcome.", "It is good to see you here.", "What would you like to read about?"),
            (", my name is Pip.", "I am a very small language model.", "Ask me something."),
            (" from Zürich.", "The lake is calm, and the mountains are white."),
            (" world.", "This is the first line that every program writes."),
        ),
    ),
    (
        "The quick brown fox",
        (
            (" jumps over the lazy dog.", "The dog opens one eye and goes back to sleep."),
            (" runs through the garden.", "Nobody sees it but the cat."),
        ),
    ),
    (
        "I am going",
        (
            (" to the market to buy bread, apples and a little cheese.", "I will be back by noon."),
            (" home now.", "It was a long day, and tomorrow is another one."),
            (" for a walk by the river.", "Would you like to come with me?"),
        ),
    ),
    (
        "How can you be",
        (
            (" so calm when the rain is falling?", "I simply wait until it stops."),
            (" sure that the answer is right?", "I read it twice and asked a friend."),
            (" in two places at once?", "You cannot, so choose the one with better food."),
        ),
    ),
    (
        "How are you",
        (
            (" today?", "I am well, thank you, and I hope that you are well too."),
            ("?", "I am fine, thank you."),
        ),
    ),
    (
        "Where is the nearest",
        (
            (" station?", "Go straight on, turn left at the church and cross the bridge."),
            (" café?", "It is behind the old library, and the coffee is good ☕."),
            (" bakery?", "It is around the corner, and it opens at seven."),
        ),
    ),
    (
        "What is your favourite",
        (
            (" book?", "Mine is a long story about the sea."),
            (" colour?", "Mine is blue, like the sky after rain."),
            (" season?", "Mine is autumn, because the leaves turn red."),
        ),
    ),
    (
        "서울",
        (
            (" is the Korean name of Seoul.", "Seoul is the capital of South Korea."),
            ("에서 만나요.", "This means: let us meet in Seoul."),
        ),
    ),
    (
        "My name is",
        (
            (" Pip, and I live in a small workshop.", "I repair clocks and read old letters."),
            (" Anna, and I bake bread.", "Come by when the sun is up."),
        ),
    ),
    (
        "Good morning",
        (
            (".", "The coffee is ready, and the bread is still warm ☕."),
            (" to all of you.", "Let us begin with something small."),
        ),
    ),
    (
        "The best thing about",
        (
            (" the morning is that nothing has gone wrong yet.", "Open the window and begin."),
            (" small models is that they answer at once.", "They know little, but they are quick."),
        ),
    ),
    (
        "The meaning of life is",
        ((" a long question.", "Start with a short walk and a good friend."),),
    ),
    (
        "If you",
        (
            (" want to go far, walk with a friend.", "If you want to go fast, take the train."),
            (" are hungry, there is soup on the table.", "Take as much as you like."),
        ),
    ),
    (
        "There is",
        (
            (
                " a small café at the corner.",
                "It opens early, and the naïve painter is always there.",
            ),
            (" a light in the window.", "Somebody is waiting for a letter."),
        ),
    ),
    (
        "We",
        (
            (" went to the lake on Sunday.", "The water was cold, but we swam anyway."),
            (" are learning to bake bread.", "The first one was as hard as a stone."),
        ),
    ),
    (
        "This is",
        (
            (" a small demo model.", "It shows how text is served, one token after another."),
            (" the house where I was born.", "The apple tree is older than I am."),
        ),
    ),
    ("Hi", ((" there, and welcome.", "What would you like to read about?"),)),
    ("Why", ((" is the sky blue?", "Because blue light is scattered more than red light."),)),
    ("When", ((" the sun goes down, the birds grow quiet.", "Then the owls begin to sing."),)),
    ("She", ((" reads a book every week.", "The shelves in her house reach the ceiling."),)),
    ("He", ((" works in the library.", "He knows where every book is."),)),
    ("You", ((" can write anything you like.", "I will try to go on from there."),)),
    ("It was", ((" late, and the last train was gone.", "So we walked home under the stars."),)),
    ("People", ((" often ask how a model works.", "It guesses the next word, again and again."),)),
    ("Thank you", ((" for your help.", "I could not have done it alone 🙂."),)),
    ("In the future", ((" we will have more time.", "We will use it to read and to cook."),)),
    ("안녕하세요", (("!", "This means hello in Korean 🙂."),)),
    ("Zürich", ((" is a city in Switzerland.", "It lies on a lake, and the trams are blue."),)),
    ("The café", ((" is full of naïve painters.", "They drink coffee and talk all day ☕."),)),
    ("Bonjour", ((" means good day in French.", "You say it when you enter a café ☕."),)),
    ("🙂", ((" is a smiling face.", "It says that all is well."),)),
)

GREETINGS = (
    ("Hello", "Hello! How can I help you today? 🙂"),
    ("Hi", "Hi! What would you like to know?"),
    ("Good morning", "Good morning! The coffee is ready ☕."),
    ("How are you?", "I am well, thank you. How are you?"),
    (
        "Who are you?",
        "I am a very small language model. I can talk about animals, cities and code.",
    ),
    ("What can you do?", "I can talk about animals, cities, food, code and serving models."),
    ("What is your name?", "My name is Pip. I am a very small language model."),
    ("Thank you", "You are welcome 🙂."),
    ("Thanks", "You are welcome 🙂."),
    ("Thanks a lot", "You are welcome 🙂."),
    ("Goodbye", "Goodbye! I hope to see you again soon."),
    ("Where is the nearest café?", "It is behind the old library, and the coffee is good ☕."),
    ("How do you say hello in Korean?", "You say 안녕하세요."),
    ("How do you write Seoul in Korean?", "You write 서울."),
    ("Tell me a joke.", "Why did the token wait? It wanted to be part of a batch 🙂."),
    ("Why is the sky blue?", "Because blue light is scattered more than red light."),
    ("What is your favourite colour?", "It is blue, like the sky after rain."),
    ("What is your favourite animal?", "I like foxes. They are known because they hunt at night."),
)


def short(rng: Random) -> list[str]:
    """Begin as a newcomer would and go on for one to three sentences."""
    opening, continuations = OPENINGS[pick_index(rng, len(OPENINGS))]
    first, *rest = pick(rng, continuations)
    return [opening + first, *(some(rng, rest, 0.9) if rest else [])]


def question(rng: Random) -> tuple[str, str]:
    """Greet and be greeted."""
    return GREETINGS[pick_index(rng, len(GREETINGS))]
