"""Our checks, in the order in which they run: one home for each promise."""

from __future__ import annotations

from llmserve.plugin import Check
from llmserve_certify.checks import (
    answers,
    bad_words,
    chat,
    constraints,
    decisions,
    hostile,
    images,
    lengths,
    logprobs,
    sampling,
    sharing,
    streams,
    values,
)

CHECKS: tuple[Check, ...] = (
    *answers.CHECKS,
    *sharing.CHECKS,
    *lengths.CHECKS,
    *streams.CHECKS,
    *chat.CHECKS,
    *logprobs.CHECKS,
    *sampling.CHECKS,
    *bad_words.CHECKS,
    *constraints.CHECKS,
    *decisions.CHECKS,
    *hostile.CHECKS,
    *images.CHECKS,
    *values.CHECKS,
)
