"""Small stories: a hero, a trouble, a helper and a good end, always in this order."""

from __future__ import annotations

from random import Random

from llmserve.demo.topics.choice import keep, pick, pick_index

HEROES = (
    ("a little robot", "Pip", "a small workshop at the edge of the town"),
    ("a young baker", "Anna", "a village between two hills"),
    ("a grey cat", "Milo", "an old library with tall windows"),
    ("a curious girl", "Zoë", "a tall house in Zürich"),
    ("a patient gardener", "Tom", "a cottage by the river"),
    ("a quiet fisherman", "Ivan", "a harbour full of red boats"),
    ("a brave mouse", "Nora", "the kitchen of a great castle"),
    ("a naïve dragon", "Otto", "a cave above the clouds"),
)

TROUBLES = (
    ("the clock in the square stopped", "Nobody knew when to get up or when to go to bed."),
    ("the river ran dry", "The mill stood still, and there was no bread."),
    ("a letter was lost in the snow", "It held news that could not wait."),
    ("the light on the hill went out", "No ship could find the way home."),
    ("a strange song came from the forest", "Everyone closed the windows and waited."),
)

HELPERS = (
    ("an owl with golden eyes", "Begin with the smallest thing, said the owl."),
    ("an old woman with a lamp", "Take my lamp, said the woman, and do not hurry."),
    ("a talking bicycle", "Hold on and trust the road, said the bicycle."),
    ("a boy who sold apples", "Let us look together, said the boy."),
)

OPENINGS = ("Once upon a time there was", "Once there lived", "Long ago there was")


def story(rng: Random) -> list[str]:
    """Tell a story of nine to fourteen sentences."""
    index = pick_index(rng, len(HEROES))
    hero, name, home = HEROES[index]
    trouble, meaning = pick(rng, TROUBLES, index)
    helper, advice = pick(rng, HELPERS, index)
    return [
        f"{pick(rng, OPENINGS)} {hero} called {name}.",
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


def short(rng: Random) -> list[str]:
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


def question(rng: Random) -> tuple[str, str]:
    """Ask for a story and tell it."""
    asked = pick(
        rng,
        ("Tell me a story.", "Please tell me a story.", "Write a short story.", "I want a story."),
        ratio=0.7,
    )
    return asked, " ".join(pick(rng, (story, short), ratio=0.4)(rng))
