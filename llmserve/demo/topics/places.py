"""Countries and their capitals: each fact is the same in every sentence."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from llmserve.demo.topics.choice import keep, pick, pick_index, some


class Place(NamedTuple):
    """A country, its capital and what a visitor meets there."""

    country: str
    capital: str
    language: str
    dish: str
    sight: str


PLACES = (
    Place("France", "Paris", "French", "fresh bread and cheese", "the Eiffel Tower"),
    Place("England", "London", "English", "fish and chips", "the Tower Bridge"),
    Place("Germany", "Berlin", "German", "potato salad", "the Brandenburg Gate"),
    Place("South Korea", "Seoul", "Korean", "kimchi with rice", "the old palace"),
    Place("Italy", "Rome", "Italian", "pasta with tomatoes", "the Colosseum"),
    Place("Spain", "Madrid", "Spanish", "rice with saffron", "the Prado Museum"),
    Place("Japan", "Tokyo", "Japanese", "noodle soup", "the temple gardens"),
    Place("Portugal", "Lisbon", "Portuguese", "grilled fish", "the yellow trams"),
    Place("Greece", "Athens", "Greek", "salad with olives", "the Acropolis"),
    Place("Norway", "Oslo", "Norwegian", "salmon with dill", "the opera house"),
    Place("Sweden", "Stockholm", "Swedish", "cinnamon buns", "the old town"),
    Place("Finland", "Helsinki", "Finnish", "rye bread", "the white cathedral"),
    Place("Denmark", "Copenhagen", "Danish", "open sandwiches", "the new harbour"),
    Place("Poland", "Warsaw", "Polish", "warm dumplings", "the market square"),
    Place("Austria", "Vienna", "German", "apple cake", "the concert hall"),
    Place("Ireland", "Dublin", "English and Irish", "warm stew", "the old library"),
    Place("Hungary", "Budapest", "Hungarian", "red pepper soup", "the hot baths"),
    Place("Egypt", "Cairo", "Arabic", "beans with bread", "the pyramids"),
    Place("Kenya", "Nairobi", "Swahili and English", "corn with greens", "the national park"),
    Place("Canada", "Ottawa", "English and French", "maple pancakes", "the frozen canal"),
    Place("Mexico", "Mexico City", "Spanish", "corn tacos", "the blue house"),
    Place("Brazil", "Brasília", "Portuguese", "black beans with rice", "the white cathedral"),
    Place("Peru", "Lima", "Spanish", "potatoes in many colours", "the cliffs by the sea"),
    Place("India", "New Delhi", "Hindi and English", "lentils with rice", "the Red Fort"),
    Place("China", "Beijing", "Chinese", "steamed buns", "the Great Wall"),
    Place("Thailand", "Bangkok", "Thai", "sweet mango with rice", "the river markets"),
    Place("Australia", "Canberra", "English", "warm meat pies", "the lake"),
    Place("Switzerland", "Bern", "German, French and Italian", "melted cheese", "the clock tower"),
)


def capital_is(place: Place) -> str:
    """Return the sentence that names the capital."""
    return f"The capital of {place.country} is {place.capital}."


def short(rng: Random) -> list[str]:
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


def long(rng: Random) -> list[str]:
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


def question(rng: Random) -> tuple[str, str]:
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
