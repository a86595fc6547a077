"""Weather, food and the small things of a day."""

from __future__ import annotations

from random import Random

from llmserve.demo.topics.choice import keep, pick, pick_index, some

SEASONS = (
    ("spring", "mild", "the first flowers open", "a light coat"),
    ("summer", "warm", "children swim in the lake", "a hat"),
    ("autumn", "windy", "the leaves turn red", "a scarf"),
    ("winter", "cold", "snow covers the roofs", "thick gloves"),
)

DISHES = (
    ("tomato soup", "tomatoes, onions and a little salt", "bread"),
    ("apple cake", "apples, flour and butter", "cream"),
    ("pancakes", "eggs, milk and flour", "honey"),
    ("vegetable stew", "carrots, beans and potatoes", "rice"),
    ("fried rice", "rice, eggs and green onions", "a cup of tea"),
    ("lemon pasta", "pasta, lemons and cheese", "a green salad"),
    ("onion bread", "flour, onions and oil", "soft cheese"),
    ("crème brûlée", "cream, sugar and eggs", "a small spoon"),
)


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


def question(rng: Random) -> tuple[str, str]:
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
