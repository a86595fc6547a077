"""Options of generators that guess tokens, and the draft model that they name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmserve.builder.causal import allowed, check_causal
from llmserve.builder.reading import read_object
from llmserve.builder.weights.quantised import quantised_in
from llmserve.errors import OptionError
from llmserve.plugins.options import Option

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

GUESS_OPTIONS = (
    Option(
        "prompt_lookup",
        0,
        "Most tokens that a step guesses from the text so far and checks, for answers that repeat "
        "parts of it; 0 disables this.",
        minimum=0,
        maximum=64,
    ),
    Option(
        "draft_model",
        "",
        "A smaller model with the same tokens, in a folder or on the hub: it guesses, and the "
        "model checks several guesses in a step, where that is faster.",
    ),
    Option(
        "draft_tokens",
        4,
        "Most tokens that the draft model guesses in a step.",
        minimum=1,
        maximum=64,
    ),
)
"""The options of a generator whose engine guesses; ``draft_context`` checks them."""


def draft_context(context: BuildContext) -> BuildContext | None:
    """Return the context of the draft model, None if there is none.

    A model with another vocabulary is refused, and so is a draft besides prompt lookup.
    """
    options = context.options
    if not options["draft_model"]:
        return None
    if options["prompt_lookup"]:
        raise OptionError(
            "draft_model and prompt_lookup are both given", hint="leave one of them out"
        )
    draft = replace(context, model=str(options["draft_model"]), options={**options, "revision": ""})
    if (found := quantised_in(draft.source.path)) and not draft.quantised(found):
        raise OptionError(
            f"draft_model={draft.source.asked} is quantised ({found}), "
            "which this plugin does not compute",
            hint="name the checkpoint in 16 bits that it was made from",
        )
    check_causal(draft.source, **allowed(draft))
    if _vocabulary(draft) != _vocabulary(context):
        raise OptionError(
            f"{draft.source.asked} and {context.source.asked} have different vocabularies",
            hint="name a draft model with the same tokenizer",
        )
    return draft


def _vocabulary(context: BuildContext) -> object:
    path = context.source.path / "tokenizer.json"
    return read_object(path)["model"]["vocab"] if path.is_file() else None
