"""The option of a generator for models that keep states."""

from __future__ import annotations

from llmserve.plugins.options import Option

STATE_OPTIONS = (
    Option(
        "state_mb",
        256,
        "Megabytes for copies of the states of hybrid and recurrent models, for prompts that begin "
        "alike; 0 keeps none.",
        minimum=0,
    ),
)
"""The options of a generator whose engine has a :class:`llmserve.runtime.StateRunner`."""
