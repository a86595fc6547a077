"""Who goes first: the numbers of one rule for all that wait, in whatever queue.

A request has a class, which is a number, and the lower one goes first, as in vLLM. So it is in the
gateway's queue, in the order in which models are loaded on demand and in the queue of an engine.
Nobody starves: who has waited for :data:`LATE_AFTER` seconds is late, and in a queue of requests
one turn in :data:`LATE_EVERY` is of those that are.
"""

from __future__ import annotations

CLASSES = range(-1000, 1001)
"""The classes that a request may ask for."""
LAST_CLASS = CLASSES[-1] + 1
"""That of requests for which nobody waits, such as those of batches: no key has it."""
LATE_AFTER = 30.0
"""Seconds that one waits before the classes above make room."""
LATE_EVERY = 8
"""One of so many turns is then of those that are late."""
