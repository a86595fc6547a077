"""Animals: where they live, what they eat and what they are known for."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from llmserve.demo.topics.choice import keep, pick, pick_index, some


class Animal(NamedTuple):
    """An animal with its article, its plural and its habits."""

    one: str
    many: str
    home: str
    food: str
    habit: str


ANIMALS = (
    Animal("a cat", "cats", "in warm houses", "fish and meat", "sleep for most of the day"),
    Animal("a dog", "dogs", "close to people", "meat and bones", "run after every ball"),
    Animal("a fox", "foxes", "at the edge of the forest", "mice and berries", "hunt at night"),
    Animal("an owl", "owls", "in old trees", "mice", "turn their heads almost all the way round"),
    Animal("a whale", "whales", "in the deep sea", "very small animals", "sing to each other"),
    Animal("an elephant", "elephants", "on wide plains", "grass and leaves", "remember old paths"),
    Animal("a bear", "bears", "in the mountains", "fish and honey", "sleep through the winter"),
    Animal("a bee", "bees", "in busy hives", "nectar", "dance to show the way to flowers"),
    Animal("a horse", "horses", "on green fields", "grass and oats", "sleep while they stand"),
    Animal("a penguin", "penguins", "on cold coasts", "fish", "keep each other warm in the wind"),
    Animal("a frog", "frogs", "near quiet ponds", "flies", "sing after the rain"),
    Animal(
        "a hedgehog", "hedgehogs", "under dry leaves", "beetles", "roll up when they are afraid"
    ),
    Animal("an otter", "otters", "along clean rivers", "fish", "hold hands while they sleep"),
    Animal("a wolf", "wolves", "in large forests", "deer", "travel together for many miles"),
    Animal(
        "a duck", "ducks", "on lakes", "plants and small snails", "follow their mother in a row"
    ),
    Animal("a tiger", "tigers", "in thick jungles", "deer", "swim well on hot days"),
    Animal(
        "a rabbit", "rabbits", "under the meadow", "grass and carrots", "listen for every sound"
    ),
    Animal("a snail", "snails", "in damp gardens", "leaves", "carry their houses with them"),
    Animal("a dolphin", "dolphins", "in warm seas", "fish", "jump beside the boats"),
    Animal("a goat", "goats", "on steep hills", "almost anything", "climb where nobody else can"),
)


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def facts(animal: Animal) -> list[str]:
    """Return the three sentences that are always true of an animal."""
    return [
        f"{_title(animal.many)} live {animal.home}.",
        f"They eat {animal.food}.",
        f"They are known because they {animal.habit}.",
    ]


def short(rng: Random) -> list[str]:
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


def long(rng: Random) -> list[str]:
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


def question(rng: Random) -> tuple[str, str]:
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
