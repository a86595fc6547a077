"""The text that the demo model is trained on, written from a seed.

A document is one to fifteen sentences on one subject. A subject is chosen first,
then a form, then each sentence; the facts about a subject never change, so that
the model's answers are steady. Conversations have the form that the chat template
renders. Where a document holds the mark ``GIVEN``, what stands before it is a prompt
that nobody could foresee, and training does not ask the model to write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

FACTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("facts.json").read_text(encoding="utf-8")
)

# choice

T = TypeVar("T")


def pick(rng: Random, options: Sequence[T], turn: int = 0, ratio: float = 0.5) -> T:
    """Choose from ``options``, each ``ratio`` times as likely as the one before it.

    Even odds would leave the trained model with ties between its two best tokens,
    and a tie can fall either way when requests are batched. ``turn`` rotates the
    options first, so that different subjects have different favourites.

    >>> pick(Random(0), ["only"])
    'only'
    """
    start = turn % len(options)
    rotated = [*options[start:], *options[:start]]
    return rng.choices(rotated, [ratio**rank for rank in range(len(rotated))])[0]


def pick_index(rng: Random, count: int) -> int:
    """Choose a subject: the first ones somewhat more often, none of them rarely."""
    return rng.choices(range(count), [1 / (rank + 6) for rank in range(count)])[0]


def keep(rng: Random, sentences: Sequence[str], least: int, share: float = 0.8) -> list[str]:
    """Keep the first ``least`` sentences and, in order, about ``share`` of the others."""
    first, rest = sentences[:least], sentences[least:]
    return [*first, *(sentence for sentence in rest if rng.random() < share)]


def some(rng: Random, sentences: Sequence[str], share: float = 0.75) -> list[str]:
    """Cut the sentences short: each follows the one before it with probability ``share``."""
    count = 1
    while count < len(sentences) and rng.random() < share:
        count += 1
    return list(sentences[:count])


# animals


class Animal(NamedTuple):
    """An animal with its article, its plural and its habits."""

    one: str
    many: str
    home: str
    food: str
    habit: str


ANIMALS = [Animal(*row) for row in FACTS["ANIMALS"]]


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def facts(animal: Animal) -> list[str]:
    """Return the three sentences that are always true of an animal."""
    return [
        f"{_title(animal.many)} live {animal.home}.",
        f"They eat {animal.food}.",
        f"They are known because they {animal.habit}.",
    ]


def animals_short(rng: Random) -> list[str]:
    """Say one to four things about an animal."""
    animal = ANIMALS[pick_index(rng, len(ANIMALS))]
    home, food, habit = facts(animal)
    favourite = f"My favourite animal is {animal.one}."
    return pick(
        rng,
        (
            [home, *some(rng, [food, habit], 0.8)],
            [favourite, home, food],
            [f"{_title(animal.one)} is an animal.", home, *some(rng, [food, habit], 0.8)],
            [f"I like {animal.many}.", habit, "I could watch them all day."],
        ),
        ratio=0.6,
    )


def animals_long(rng: Random) -> list[str]:
    """Tell of meeting an animal, in eight to twelve sentences."""
    index = pick_index(rng, len(ANIMALS))
    animal = ANIMALS[index]
    one = animal.one.split(" ", 1)[1]
    opening = pick(rng, (f"Tell me about {animal.many}.", f"Yesterday I saw {animal.one}."))
    return keep(
        rng,
        [
            opening,
            *facts(animal),
            f"The {one} that I met was young and a little shy.",
            "It looked at me, and I stood very still.",
            "After a while it came closer.",
            pick(rng, ("A bird sang above us.", "The wind was quiet.", "The sun was low."), index),
            "Then a branch broke, and it was gone.",
            "I waited for an hour, but it did not come back.",
            "At home I drew a small picture of it.",
            "The picture hangs above my desk now 🙂.",
        ],
        least=5,
    )


def animals_question(rng: Random) -> tuple[str, str]:
    """Ask and answer something about an animal."""
    animal = ANIMALS[pick_index(rng, len(ANIMALS))]
    home, food, habit = facts(animal)
    return pick(
        rng,
        (
            (f"Where do {animal.many} live?", home),
            (f"What do {animal.many} eat?", f"{_title(animal.many)} eat {animal.food}."),
            (f"Tell me about {animal.many}.", f"{home} {food} {habit}"),
            (f"What is {animal.one}?", f"{_title(animal.one)} is an animal. {home} {food}"),
            (f"Do you like {animal.many}?", f"Yes, I like {animal.many}. {habit}"),
        ),
        ratio=0.85,
    )


# daily

SEASONS = FACTS["SEASONS"]


DISHES = FACTS["DISHES"]


def weather(rng: Random) -> list[str]:
    """Talk about the weather of a season, of today or of tomorrow."""
    season, mood, sign, wear = SEASONS[pick_index(rng, len(SEASONS))]
    advice = f"Take {wear} with you when you go out."
    return pick(
        rng,
        (
            [f"In {season} the weather is {mood}, and {sign}.", *some(rng, [advice])],
            [
                "The weather is fine today.",
                "The sky is blue, and a light wind comes from the west.",
                *some(rng, ["It is a good day for a walk."]),
            ],
            [
                "It is raining again.",
                "The streets are wet, and everyone carries an umbrella.",
                *some(rng, ["By the evening the clouds should be gone."]),
            ],
            [
                "Tomorrow will be sunny in the morning and cloudy in the afternoon.",
                *some(rng, ["In the evening there may be a little rain."]),
            ],
            ["Today is a quiet day.", f"It is {season}, and {sign}.", advice],
        ),
        ratio=0.75,
    )


def food(rng: Random) -> list[str]:
    """Say what a dish is made of."""
    dish, parts, side = DISHES[pick_index(rng, len(DISHES))]
    made = f"{dish[0].upper()}{dish[1:]} is made of {parts}."
    served = f"It tastes best with {side}."
    return pick(
        rng,
        (
            [made, *some(rng, [served, "Even children like it."])],
            [f"My favourite food is {dish}.", served, "I could eat it every day."],
            [f"For dinner we had {dish}.", served, *some(rng, ["Nothing was left over."])],
        ),
    )


def recipe(rng: Random) -> list[str]:
    """Explain how a dish is cooked, in eight to eleven sentences."""
    index = pick_index(rng, len(DISHES))
    dish, parts, side = DISHES[index]
    opening = pick(
        rng, (f"To make {dish}, you need {parts}.", f"Here is how to cook {dish}: take {parts}.")
    )
    return keep(
        rng,
        [
            opening,
            "First wash your hands and clear the table.",
            "Then cut everything into small pieces.",
            "Warm the pan slowly, because a hot pan is quick to burn.",
            "Stir with a wooden spoon and taste now and then.",
            pick(rng, ("Wait for ten minutes.", "Wait for twenty minutes."), index),
            "In the meantime you can set the table and call your friends.",
            "Add a little pepper at the end.",
            f"Serve it with {side}.",
            "Do not forget to open the window.",
            "Enjoy your meal.",
        ],
        least=4,
    )


def daily_question(rng: Random) -> tuple[str, str]:
    """Ask and answer something about food or the weather."""
    dish, parts, side = DISHES[pick_index(rng, len(DISHES))]
    season, mood, sign, wear = SEASONS[pick_index(rng, len(SEASONS))]
    return pick(
        rng,
        (
            (f"How do I make {dish}?", f"You need {parts}. Cook slowly and serve it with {side}."),
            ("What is the weather like today?", "The weather is fine. The sky is blue today."),
            (f"What is {season} like?", f"In {season} the weather is {mood}, and {sign}."),
            ("What should I wear?", f"It is {season}, so take {wear} with you."),
            ("What should I eat tonight?", f"How about {dish}? It tastes best with {side}."),
        ),
        ratio=0.9,
    )


# openings

OPENINGS = FACTS["OPENINGS"]


GREETINGS = FACTS["GREETINGS"]


def openings_short(rng: Random) -> list[str]:
    """Begin as a newcomer would and go on for one to three sentences."""
    opening, continuations = OPENINGS[pick_index(rng, len(OPENINGS))]
    first, *rest = pick(rng, continuations)
    return [opening + first, *(some(rng, rest, 0.9) if rest else [])]


def openings_question(rng: Random) -> tuple[str, str]:
    """Greet and be greeted."""
    asked, answer = GREETINGS[pick_index(rng, len(GREETINGS))]
    return asked, answer


# places


class Place(NamedTuple):
    """A country, its capital and what a visitor meets there."""

    country: str
    capital: str
    language: str
    dish: str
    sight: str


PLACES = [Place(*row) for row in FACTS["PLACES"]]


def capital_is(place: Place) -> str:
    """Return the sentence that names the capital."""
    return f"The capital of {place.country} is {place.capital}."


def places_short(rng: Random) -> list[str]:
    """Say one to four things about a country."""
    place = PLACES[pick_index(rng, len(PLACES))]
    dish = f"Visitors like to eat {place.dish} there."
    sight = f"Many people come to see {place.sight}."
    speak = f"In {place.country} people speak {place.language}."
    reverse = f"{place.capital} is the capital of {place.country}."
    return pick(
        rng,
        (
            [capital_is(place), *some(rng, [sight, dish], 0.7)],
            [reverse, *some(rng, [sight, dish], 0.7)],
            [speak, *some(rng, [capital_is(place)], 0.7)],
            [f"{place.capital} is a city in {place.country}.", *some(rng, [sight, dish], 0.7)],
        ),
        ratio=0.7,
    )


def places_long(rng: Random) -> list[str]:
    """Tell of a journey to a capital, in eight to fourteen sentences."""
    index = pick_index(rng, len(PLACES))
    place = PLACES[index]
    companion = pick(rng, ("my brother", "my aunt", "two friends"), index)
    opening = pick(
        rng,
        (
            f"Tell me about {place.capital}.",
            f"Last summer I went to {place.capital} with {companion}.",
            f"Let me tell you about {place.country}.",
        ),
        ratio=0.7,
    )
    return keep(
        rng,
        [
            opening,
            f"{place.capital} is the capital of {place.country}.",
            f"In {place.country} people speak {place.language}.",
            "We arrived early in the morning, when the streets were still quiet.",
            "First we left our bags in a small hotel.",
            f"Then we went to see {place.sight}.",
            f"At noon we ate {place.dish}.",
            "A friendly waiter told us where to find the best view.",
            "We walked up the hill and saw the whole city below us.",
            "In the afternoon it rained a little, so we sat in a café.",
            "I wrote three postcards and drank a cup of coffee ☕.",
            "In the evening there was music in the street.",
            "We stayed until the last song was over.",
            f"I would go back to {place.capital} tomorrow.",
        ],
        least=6,
    )


def places_question(rng: Random) -> tuple[str, str]:
    """Ask and answer something about a country."""
    place = PLACES[pick_index(rng, len(PLACES))]
    dish = f"Visitors like to eat {place.dish} there."
    sight = f"Many people come to see {place.sight}."
    return pick(
        rng,
        (
            (f"What is the capital of {place.country}?", capital_is(place)),
            (f"Capital of {place.country}?", capital_is(place)),
            (
                f"Tell me about {place.capital}.",
                f"{place.capital} is the capital of {place.country}. {sight} {dish}",
            ),
            (f"Where is {place.capital}?", f"{place.capital} is a city in {place.country}."),
            (
                f"What should I see in {place.capital}?",
                f"You should see {place.sight}. {dish}",
            ),
            (
                f"Which language do people speak in {place.country}?",
                f"In {place.country} people speak {place.language}.",
            ),
            (
                f"Tell me about {place.country}.",
                f"{capital_is(place)} {sight} {dish}",
            ),
        ),
        ratio=0.85,
    )


# programming


class Language(NamedTuple):
    """A programming language, what it is good for and what it is known for."""

    name: str
    use: str
    strength: str


LANGUAGES = [Language(*row) for row in FACTS["LANGUAGES"]]


SIMILES = FACTS["SIMILES"]


OTHERS = FACTS["OTHERS"]


def is_like(rng: Random, index: int) -> list[str]:
    """Return the two sentences that say what programming in a language is like."""
    simile, reason = pick(rng, SIMILES, turn=index, ratio=0.35)
    return [f"Programming in {LANGUAGES[index].name} is like {simile}.", reason]


def programming_short(rng: Random) -> list[str]:
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


def programming_long(rng: Random) -> list[str]:
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


def programming_question(rng: Random) -> tuple[str, str]:
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


# serving

TERMS = FACTS["TERMS"]


def _lower(term: str) -> str:
    return term if term == "Triton" else term[0].lower() + term[1:]


def serving_short(rng: Random) -> list[str]:
    """Explain one term in one to three sentences."""
    term, meaning, detail, more = TERMS[pick_index(rng, len(TERMS))]
    return [f"{term} is {meaning}.", *some(rng, [detail, more], 0.85)]


def serving_long(rng: Random) -> list[str]:
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


def serving_question(rng: Random) -> tuple[str, str]:
    """Ask and answer what a term means."""
    term, meaning, detail, more = TERMS[pick_index(rng, len(TERMS))]
    asked = pick(
        rng,
        (f"What is {_lower(term)}?", f"Please explain what {_lower(term)} is."),
    )
    return asked, " ".join([f"{term} is {meaning}.", *some(rng, [detail, more], 0.85)])


# stories

HEROES = FACTS["HEROES"]


TROUBLES = FACTS["TROUBLES"]


HELPERS = FACTS["HELPERS"]


STORY_OPENINGS = FACTS["STORY_OPENINGS"]


def story(rng: Random) -> list[str]:
    """Tell a story of nine to fourteen sentences."""
    index = pick_index(rng, len(HEROES))
    hero, name, home = HEROES[index]
    trouble, meaning = pick(rng, TROUBLES, index)
    helper, advice = pick(rng, HELPERS, index)
    return [
        f"{pick(rng, STORY_OPENINGS)} {hero} called {name}.",
        f"{name} lived in {home}.",
        *keep(rng, [f"Every morning {name} greeted the neighbours and went to work."], 0),
        f"One day {trouble}.",
        meaning,
        f"So {name} packed a bag and set out to help.",
        *keep(rng, ["The way was long, and the night was dark."], 0),
        f"On the road {name} met {helper}.",
        advice,
        *keep(
            rng,
            [
                "They walked until the sun came up.",
                f"Then {name} saw what had to be done.",
                "It took all day and all the courage that was left.",
            ],
            0,
        ),
        "In the end everything was well again.",
        *keep(rng, ["The whole town came out to sing and to dance."], 0),
        f"And {name} slept better than ever before.",
    ]


def stories_short(rng: Random) -> list[str]:
    """Tell only how a day of the hero was, in three to five sentences."""
    index = pick_index(rng, len(HEROES))
    hero, name, home = HEROES[index]
    trouble, _ = pick(rng, TROUBLES, index)
    return [
        f"{name} was {hero} who lived in {home}.",
        f"One day {trouble}.",
        *keep(rng, [f"{name} was not afraid.", "It was only a matter of patience."], 0),
        "By the evening everything was well again.",
    ]


def stories_question(rng: Random) -> tuple[str, str]:
    """Ask for a story and tell it."""
    asked = pick(
        rng,
        ("Tell me a story.", "Please tell me a story.", "Write a short story.", "I want a story."),
        ratio=0.7,
    )
    return asked, " ".join(pick(rng, (story, stories_short), ratio=0.4)(rng))


# unfamiliar

GIVEN = "\x1f"


WORDS = FACTS["WORDS"].split()


LINKS = FACTS["LINKS"]


STARTS = FACTS["STARTS"]


ASKED = FACTS["ASKED"]


BEYOND = FACTS["BEYOND"]


HONEST = FACTS["HONEST"]


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


def unfamiliar_short(rng: Random) -> list[str]:
    """Begin with something unfamiliar, break off and say why."""
    return [f"{fragment(rng)}{GIVEN} ...", *HONEST]


def unfamiliar_question(rng: Random) -> tuple[str, str]:
    """Ask for what the model cannot know, and say so."""
    if rng.random() < 0.25:
        names = (
            rng.choice(PLACES).capital,
            rng.choice(PLACES).country,
            rng.choice(ANIMALS).one,
            rng.choice(LANGUAGES).name,
        )
        asked = rng.choice(BEYOND).format(pick(rng, names, ratio=0.8))
    else:
        asked = rng.choice(ASKED).format(fragment(rng, 3).rstrip(".?:,") or "it")
    return asked, " ".join(HONEST)


# chat

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


SYSTEM = FACTS["SYSTEM"]


TOPICS = (
    places_question,
    programming_question,
    openings_question,
    animals_question,
    serving_question,
    unfamiliar_question,
    daily_question,
    stories_question,
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
    if topic is unfamiliar_question:
        return [asked + GIVEN, answer]
    if not asked.endswith("?"):
        # A plain "Tell me about …" opens a longer text elsewhere.
        asked, answer = serving_question(rng)
    return [asked, answer]


def conversation(rng: Random) -> list[str]:
    """Return a conversation of one to three turns, a third of them under a system message."""
    turns = END.join(turn(rng) for _ in range(pick(rng, (1, 2, 3))))
    if rng.random() < 0.33:
        turns = f"System: {SYSTEM[pick_index(rng, len(SYSTEM))]}\n{turns}"
    return [turns]


# How often each kind of document is written.
WEIGHTED: tuple[tuple[Callable[[Random], list[str]], int], ...] = (
    (programming_short, 10),
    (other, 5),
    (programming_long, 5),
    (places_short, 10),
    (places_long, 4),
    (animals_short, 8),
    (animals_long, 4),
    (serving_short, 6),
    (serving_long, 2),
    (weather, 5),
    (food, 5),
    (recipe, 3),
    (story, 6),
    (stories_short, 3),
    (openings_short, 22),
    (unfamiliar_short, 12),
    (plain, 14),
    (conversation, 30),
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
    rng = Random(seed)
    while True:
        yield document(rng)
