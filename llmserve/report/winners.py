"""What a sweep says in words: who won, over whom, and by more than the rounds differ or not."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.measure.series import Sweep, Variant
from llmserve.report.metrics import Metric, rounds
from llmserve.report.words import clean, counted, seconds, times


def findings(sweep: Sweep, ranked: Sequence[Variant], wanted: Metric) -> list[str]:
    """Give a sentence for each thing that can be said."""
    found = []
    if not ranked:
        found.append("No variant was measured to the end.")
    else:
        found += _winner(sweep, ranked, wanted)
    states = {
        state: sum(variant.state == state for variant in sweep.variants)
        for state in ("done", "stopped", "failed", "waiting")
    }
    line = (
        f"Of {counted(len(sweep.variants), 'variant')}, {states['done']} were measured to the end"
    )
    for state, words in (
        ("stopped", "stopped early, since none of it could win"),
        ("failed", "failed"),
        ("waiting", "not reached"),
    ):
        if states[state]:
            line += f", {states[state]} {words}"
    return [*found, f"{line}."]


def _winner(sweep: Sweep, ranked: Sequence[Variant], wanted: Metric) -> list[str]:
    first = ranked[0]
    mean = rounds(first.runs, wanted.name)
    if mean is None:
        return []
    limited = sweep.limit_latency is not None or sweep.limit_ttft is not None
    found = []
    if limited and first.within is False:
        found.append(
            "No variant held the limit; the first of the ranking is the fastest of the others."
        )
    under = " within the limit" if limited and first.within else ""
    line = f"{clean(first.name)} gave the most {wanted.label}{under}: {mean.show(wanted.show)}"
    if first.latency is not None:
        line += f", with 99 % of the answers complete within {seconds(first.latency)}"
    found.append(f"{line}.")
    peers = [variant for variant in ranked[1:] if variant.within == first.within]
    measured = [(variant, rounds(variant.runs, wanted.name)) for variant in peers]
    alike = [clean(variant.name) for variant, other in measured if other and other.high >= mean.low]
    if alike:
        more = f" and {counted(len(alike) - 3, 'other')}" if len(alike) > 3 else ""
        found.append(
            f"The rounds of {', '.join(alike[:3])}{more} overlap with those of the first: "
            "the order of these says little."
        )
    least = min(
        ((variant, other) for variant, other in measured if other and other.value),
        key=lambda pair: pair[1].value,
        default=None,
    )
    if least and clean(least[0].name) not in alike:
        by = times(mean.value / least[1].value)
        found.append(
            f"That is {by} what {clean(least[0].name)} gave, the least of all that "
            f"{'held' if first.within else 'missed'} the limit."
            if limited
            else f"That is {by} what {clean(least[0].name)} gave, the last of the ranking."
        )
    return found
