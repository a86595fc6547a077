"""Which users a release takes: always the same, about as many as it says, and never back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve_gateway.releases.split import Split, place_of, user_of

names = st.text(max_size=30)
shares = st.floats(0, 1)
USERS = [f"user {number}" for number in range(20_000)]


@given(names, names, shares, shares)
def test_a_larger_share_moves_nobody_back(salt: str, user: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert Split(salt, large).takes(user) or not Split(salt, small).takes(user)


@given(names, names)
def test_none_and_all(salt: str, user: str) -> None:
    assert not Split(salt, 0).takes(user)
    assert Split(salt, 1).takes(user)
    assert 0 <= place_of(salt, user) < 1


def test_the_place_of_a_user_is_the_same_in_every_process() -> None:
    """A hash of Python's own is another one after each start."""
    assert place_of("m=n", "key alice") == pytest.approx(0.11699654043486118, abs=0)


def test_about_as_many_users_are_taken_as_it_says() -> None:
    for share in (0.01, 0.05, 0.5):
        taken = sum(Split("m=n", share).takes(user) for user in USERS)
        deviation = math.sqrt(len(USERS) * share * (1 - share))
        assert abs(taken - share * len(USERS)) < 4 * deviation


def test_another_release_takes_others() -> None:
    """Those who met one faulty build are not the first to meet each."""
    one = {user for user in USERS if Split("m=n", 0.1).takes(user)}
    both = sum(Split("m=o", 0.1).takes(user) for user in one)
    assert both < len(one) * 0.15


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_two_users_are_one_only_if_they_are_the_same(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    (key, named, address), (other_key, other_named, other_address) = one, other
    if user_of(*one) != user_of(*other):
        return
    if named or other_named:
        assert (key, named) == (other_key, other_named)
    elif key or other_key:
        assert key == other_key
    else:
        assert address == other_address


def test_who_is_named_belongs_to_the_key() -> None:
    assert user_of("a", "bob", "1.2.3.4") != user_of("b", "bob", "1.2.3.4")
    assert user_of("a", "", "1.2.3.4") == user_of("a", "", "5.6.7.8")
