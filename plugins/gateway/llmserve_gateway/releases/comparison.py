"""What two builds made of one request, and whose fault it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmserve.client import Completion, Parting, Tools
from llmserve_gateway.releases.conformance import what_is_wrong
from llmserve_gateway.releases.evidence import Tolerance

Measure = Literal["errors", "answers", "cut", "differs", "slow"]

MEASURES: Mapping[Measure, str] = {
    "errors": "requests that end with an error",
    "answers": "answers that are empty, or not in the form that was asked for",
    "cut": "answers that do not end by themselves",
    "differs": "greedy answers that differ by more than rounding explains",
    "slow": "answers that take half as long again for each token",
}
TOLERANCES: Mapping[Measure, Tolerance] = {
    "errors": Tolerance(0.01, 0.05),
    "answers": Tolerance(0.01, 0.05),
    "cut": Tolerance(0.05, 0.15),
    "differs": Tolerance(0.05, 0.15),
    "slow": Tolerance(0.1, 0.3),
}
"""How much more often a new build may fail, and what it may not be promoted with. The chance to
return one falsely is 1 % for each measure, and so at most 5 % for all of them."""


@dataclass(frozen=True)
class Heard:
    """What a build made of a request: its answers, or an error's code."""

    answers: Sequence[Completion] = ()
    error: str = ""
    seconds: float | None = None

    @property
    def text(self) -> str:
        return "\n".join(answer.text for answer in self.answers)


@dataclass(frozen=True)
class Comparison:
    """What is seen of each measure: how much each build failed, the new one first."""

    failed: Mapping[Measure, tuple[float, float]]
    said: Sequence[str] = ()
    """What is wrong with the new build's answer, in words without any text of it."""

    @property
    def is_worse(self) -> bool:
        return any(new > old for new, old in self.failed.values())


def is_greedy(options: Mapping[str, Any]) -> bool:
    """Return whether a request has one right answer, for all builds that are the same model."""
    return options.get("temperature") == 0 or options.get("top_k") == 1


def compare(
    options: Mapping[str, Any],
    old: Heard,
    new: Heard,
    explained: float,
    *,
    greedy: bool,
    tools: Tools | None = None,
) -> Comparison:
    """Compare what two builds made of a request with these options and tools."""
    failed: dict[Measure, tuple[float, float]] = {
        "errors": (bool(new.error), bool(old.error)),
    }
    if new.error or old.error:
        return Comparison(failed, [f"error {new.error}"] if new.error else [])
    said, wrong = [], [what_is_wrong(answer, options, tools) for answer in new.answers]
    said += [each for each in wrong if each]
    old_wrong = [what_is_wrong(answer, options, tools) for answer in old.answers]
    failed["answers"] = (any(wrong), any(old_wrong))
    cut = [any(a.finish_reason == "length" for a in each.answers) for each in (new, old)]
    failed["cut"] = (cut[0], cut[1])
    said += ["it is cut, and the other is not"] if cut[0] and not cut[1] else []
    found = _differences(old, new, explained, greedy=greedy)
    if found is not None:
        failed["differs"] = (bool(found), 0)
        said += [found] if found else []
    return Comparison(failed, said)


def _differences(old: Heard, new: Heard, explained: float, *, greedy: bool) -> str | None:
    """Return what differs that may not, "" if nothing does, None if that cannot be said."""
    for ours, theirs in zip(old.answers, new.answers, strict=False):
        one, other = ours.input_tokens, theirs.input_tokens
        if one and other and one != other:
            # The template or the tokenizer is another one.
            return f"its prompt has {other} tokens, that of the other {one}"
    if not greedy:
        return None
    is_said = True
    for ours, theirs in zip(old.answers, new.answers, strict=False):
        if ours.text == theirs.text:
            continue
        parting = Parting.find(ours.logprobs or (), theirs.logprobs or ())
        verdict = "unexplained" if parting is None else parting.verdict(explained)
        if verdict == "differs" and parting is not None:
            return (
                f"its token {parting.at} is another one, and that takes a change of "
                f"{parting.change or 0:.2f} in logits or more"
            )
        is_said = is_said and verdict == "tie"
    return "" if is_said else None
