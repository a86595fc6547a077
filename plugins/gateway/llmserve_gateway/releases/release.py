"""One release: who meets the new build, what has been seen of it, and what became of it."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, get_args

from llmserve.errors import UsageError
from llmserve_gateway.releases.comparison import (
    MEASURES,
    TOLERANCES,
    Comparison,
    Heard,
    Measure,
)
from llmserve_gateway.releases.evidence import Evidence, Tolerance, Verdict, joint_verdict
from llmserve_gateway.releases.split import Split

Kind = Literal["shadow", "canary"]
Stage = Literal["watched", "promoted", "returned", "aborted"]

PAIRS = 10
"""Pairs of answers that are kept."""
EXPLAINED = 1.0
"""The change in logits that is no fault of a build whose weights were rounded to 8 bits."""
_NEEDED: Sequence[Measure] = ("errors", "answers", "cut")
"""What can be seen of every request; the rest is asked for as soon as it is seen."""
_SLOW = 1.5
_RATES, _FEWEST_RATES = 100, 20
_LONGEST_TEXT = 20_000


@dataclass(frozen=True)
class Plan:
    """What is to be released: ``new`` beside ``name``, to a share of requests or of users."""

    kind: Kind
    name: str
    new: str
    share: float

    @property
    def salt(self) -> str:
        return f"{self.name}={self.new}"


def read_share(text: str, of: str) -> float:
    """Return a share that is given as ``5%`` or ``0.05``."""
    number = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?|\.\d{1,9})(%?)", text.strip())
    share = float(number[1]) / (100 if number[2] else 1) if number else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{of}: {text!r} is no share", hint="give one such as 5%")
    return share


_SHARES: Mapping[Kind, str] = {"shadow": "10%", "canary": "5%"}


def read_plans(shadows: Sequence[str], canaries: Sequence[str]) -> list[Plan]:
    """Return the releases of ``--shadow`` and ``--canary``, each ``NAME=NEW[:SHARE]``."""
    plans: dict[str, Plan] = {}
    words: list[tuple[Kind, str]] = [("shadow", word) for word in shadows]
    words += [("canary", word) for word in canaries]
    for kind, word in words:
        name, _, rest = word.partition("=")
        new, _, share = rest.partition(":")
        option = f"--{kind} {word!r}"
        if not name or not new or name == new:
            raise UsageError(f"{option} names no new build", hint="give NAME=NEW, or NAME=NEW:5%")
        if name in plans:
            raise UsageError(
                f"{option}: there is a release of {name} already",
                hint="have one at a time: first a shadow, then a canary",
            )
        plans[name] = Plan(kind, name, new, read_share(share or _SHARES[kind], option))
    if both := sorted({plan.new for plan in plans.values()} & {*plans}):
        raise UsageError(f"{both[0]} is released and has a release", hint="have one at a time")
    return list(plans.values())


@dataclass(frozen=True)
class Tolerances:
    """What is still no fault."""

    of: Mapping[Measure, Tolerance] = field(default_factory=lambda: dict(TOLERANCES))
    explained: float = EXPLAINED


def read_tolerances(words: Sequence[str]) -> Tolerances:
    """Return what ``--release-tolerance NAME=VALUE`` says: ``logits``, or a measure's rate."""
    of, explained = dict(TOLERANCES), EXPLAINED
    for word in words:
        name, _, text = word.partition("=")
        what = f"--release-tolerance {word!r}"
        if name == "logits" and re.fullmatch(r"\d{1,3}(\.\d{1,9})?", text):
            explained = float(text)
            continue
        measure = next((each for each in MEASURES if each == name), None)
        if measure is None:
            known = ", ".join((*MEASURES, "logits"))
            raise UsageError(f"{what} names no measure", hint=f"there are {known}")
        if text == "off":
            del of[measure]
            continue
        allowed = read_share(text, what) if text.strip("0.%") else 0.0
        usual = TOLERANCES[measure]
        fault = allowed + usual.fault - usual.allowed
        if fault > 1:
            raise UsageError(f"{what} allows everything", hint=f"write {name}=off")
        of[measure] = replace(usual, allowed=allowed, fault=fault)
    return Tolerances(of, explained)


@dataclass(frozen=True)
class Pair:
    """Two answers to one request; their texts only if they may be kept."""

    at: float
    is_worse: bool
    said: Sequence[str]
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    prompt: str = ""


class Release:
    """What has been seen of a new build. All of it runs on one event loop."""

    def __init__(
        self,
        plan: Plan,
        tolerances: Tolerances,
        *,
        keep_texts: float = 0.0,
        clock: Callable[[], float] = time.time,
        on_move: Callable[[Release], None] = lambda _: None,
    ) -> None:
        """``keep_texts`` is for how many seconds texts of users are kept, if they are.

        ``on_move`` is told when it is decided what becomes of the new build.
        """
        self._on_move = on_move
        self.plan = plan
        self.share = plan.share
        self.stage: Stage = "watched"
        self.why = ""
        self.explained = tolerances.explained
        self.evidence: dict[Measure, Evidence] = {
            measure: Evidence(tolerance) for measure, tolerance in tolerances.of.items()
        }
        self.requests = {"old": 0, "new": 0}
        """How many each build has answered users."""
        self.compared = 0
        self.dropped = 0
        """How many were not compared after all, since the server had others to answer."""
        self.saved = 0
        """How many the old build has answered after the new one has failed."""
        self._clock = clock
        self._keep_texts = keep_texts
        self._pairs: list[Pair] = []
        self._rates: deque[float] = deque(maxlen=_RATES)
        """Seconds for each token of the old build."""
        self._old_slow: list[bool] = []
        self.changed = clock()
        self.builds: tuple[str, str] | None = None
        """The fingerprints of the old and the new build, once they are known."""

    def state(self) -> dict[str, Any]:
        """Return what a gateway that starts again has to know, as JSON; texts are none of it."""
        return {
            **self._begun_with(), "builds": self.builds, "planned": self.plan.share,
            "share": self.share, "stage": self.stage, "why": self.why, "changed": self.changed,
            "requests": dict(self.requests), "compared": self.compared, "dropped": self.dropped,
            "saved": self.saved,
            "evidence": {name: each.state() for name, each in self.evidence.items()},
        }  # fmt: skip

    def _begun_with(self) -> dict[str, Any]:
        """Return what evidence depends on: what is found otherwise says nothing of this one."""
        tolerances = {name: asdict(each.tolerance) for name, each in self.evidence.items()}
        explained = {"logits": self.explained}
        return {"kind": self.plan.kind, "new": self.plan.new, "tolerances": tolerances | explained}

    def go_on(self, state: Mapping[str, Any]) -> bool:
        """Go on with what another process had; return False if that was another release.

        Raise ValueError, KeyError or TypeError if it is nothing like it.
        """
        if any(state[name] != value for name, value in self._begun_with().items()):
            return False
        builds, stage, share = state["builds"], state["stage"], state["share"]
        counts = [state["compared"], state["dropped"], state["saved"]]
        counts += [state["requests"][name] for name in self.requests]
        if (
            not (builds is None or (len(builds) == 2 and all(isinstance(b, str) for b in builds)))
            or stage not in get_args(Stage)
            or not all(type(count) is int and count >= 0 for count in counts)
            or not 0 < share <= 1
        ):
            raise ValueError("this is no release")
        for name, each in self.evidence.items():
            each.go_on(state["evidence"][name])
        # A share that somebody has written anew is what they want now.
        self.share = share if state["planned"] == self.plan.share else self.plan.share
        self.stage, self.why, self.changed = stage, str(state["why"]), float(state["changed"])
        self.builds = (builds[0], builds[1]) if builds else None
        self.compared, self.dropped, self.saved = counts[:3]
        self.requests = dict(zip(self.requests, counts[3:], strict=True))
        return True

    def is_of(self, builds: tuple[str, str]) -> None:
        """Hear the fingerprints of the old and the new build: other ones have to begin anew."""
        if self.builds is not None and self.builds != builds:
            begun = Release(self.plan, Tolerances(
                {name: each.tolerance for name, each in self.evidence.items()}, self.explained
            ))  # fmt: skip
            self.evidence, self.requests = begun.evidence, begun.requests
            self.compared = self.dropped = self.saved = 0
            self.share, self._pairs, self._old_slow = self.plan.share, [], []
            self._rates.clear()
            self.builds = builds
            self._move("watched", "begun anew, as one of the two was built again")
        self.builds = builds

    def takes(self, user: str) -> bool:
        """Return whether the new build answers a user."""
        if self.stage == "promoted":
            return True
        is_open = self.stage == "watched" and self.plan.kind == "canary"
        return is_open and Split(self.plan.salt, self.share).takes(user)

    @property
    def share_now(self) -> float:
        """The share of users whom the new build answers, or of requests that a shadow gets."""
        return {"watched": self.share, "promoted": 1.0}.get(self.stage, 0.0)

    @property
    def is_watched(self) -> bool:
        return self.stage == "watched"

    @property
    def verdict(self) -> Verdict:
        return joint_verdict(
            [each for name, each in self.evidence.items() if each.seen or name in _NEEDED]
        )

    def note_rate(self, seconds: float, tokens: int, *, new: bool) -> None:
        """Note how long a build took for an answer to a user, of which both answer some."""
        if "slow" not in self.evidence or not tokens or not self.is_watched:
            return
        rate, known = seconds / tokens, len(self._rates) >= _FEWEST_RATES
        is_slow = known and rate > _SLOW * median(self._rates)
        if not new:
            self._old_slow += [is_slow] if known else []
            self._rates.append(rate)
        elif known and (others := self._old_slow):
            self.evidence["slow"].add(is_slow, sum(others) / len(others))
            # Only what has come since then is set against the next one.
            self._old_slow = [] if len(others) > 1 else others[-1:]
            self._decide()

    def note(self, comparison: Comparison, old: Heard, new: Heard, prompt: str = "") -> None:
        """Note what two builds made of a request."""
        if not self.is_watched:
            return
        self.compared += 1
        for measure, (new_failed, old_failed) in comparison.failed.items():
            if measure in self.evidence:
                self.evidence[measure].add(new_failed, old_failed)
        self._keep(comparison, old, new, prompt)
        self._decide()

    def _keep(self, comparison: Comparison, old: Heard, new: Heard, prompt: str) -> None:
        if len(self._pairs) >= PAIRS:
            # What is worse takes the place of what is not.
            fine = next((pair for pair in self._pairs if not pair.is_worse), None)
            if fine is None or not comparison.is_worse:
                return
            self._pairs.remove(fine)
        keeps = self._keep_texts > 0
        self._pairs.append(
            Pair(
                self._clock(),
                comparison.is_worse,
                comparison.said,
                _facts(old, keeps),
                _facts(new, keeps),
                prompt[:_LONGEST_TEXT] if keeps else "",
            )
        )

    def pairs(self) -> list[Pair]:
        """Return them, without the texts whose time is over."""
        until = self._clock() - self._keep_texts
        self._pairs = [
            pair
            if pair.at > until
            else replace(pair, prompt="", old=_without_text(pair.old), new=_without_text(pair.new))
            for pair in self._pairs
        ]
        return list(self._pairs)

    def _decide(self) -> None:
        verdict = self.verdict
        if verdict == "worse":
            worst = [name for name, each in self.evidence.items() if each.verdict == "worse"]
            self._move("returned", "; ".join(map(self._reason, worst)))
        elif verdict == "fine" and self.plan.kind == "canary":
            self._move("promoted", f"as good as {self.plan.name} in {self.compared} requests")

    def _reason(self, measure: Measure) -> str:
        each = self.evidence[measure]
        return (
            f"{MEASURES[measure]}: {each.new_failures} of {each.seen}, "
            f"{each.old_failures} of {self.plan.name}"
        )

    def promote(self, share: float = 1.0) -> None:
        """Have the new build answer all users, or a larger share of them, by order."""
        if share >= 1:
            self._move("promoted", "by order")
            return
        if self.plan.kind != "canary" or not self.is_watched:
            hint = "promote it without a share, or start with --canary"
            raise UsageError(f"{self.plan.new} answers no share of users", hint=hint)
        if share < self.share:
            hint = "abort it, which moves them all back"
            raise UsageError(f"{self.plan.new} answers {self.share:.3g} already", hint=hint)
        self.share = share

    def abort(self) -> None:
        """Have the old build answer everybody again."""
        self._move("aborted", "by order")

    def _move(self, stage: Stage, why: str) -> None:
        self.stage, self.why, self.changed = stage, why, self._clock()
        self._on_move(self)

    def in_words(self) -> str:
        """Return what became of it, for a log."""
        share = f"{self.share:.3g} of users" if self.plan.kind == "canary" else ""
        words = [f"{self.plan.new} is {self.stage}", share if self.is_watched else "", self.why]
        return ", ".join(filter(None, words))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.plan.name,
            "new": self.plan.new,
            "kind": self.plan.kind,
            "stage": self.stage,
            "why": self.why,
            "share": self.share_now,
            "verdict": self.verdict,
            "changed": round(self.changed, 3),
            "requests": dict(self.requests),
            "compared": self.compared,
            "dropped": self.dropped,
            "answered_by_old_instead": self.saved,
            "measures": [
                {
                    "name": name,
                    "what": MEASURES[name],
                    "seen": each.seen,
                    "new_failures": each.new_failures,
                    "old_failures": each.old_failures,
                    "difference": each.difference,
                    "allowed": each.tolerance.allowed,
                    "fault": each.tolerance.fault,
                    "verdict": each.verdict,
                    "chance_if_fine": each.chance_if_fine,
                    "chance_if_faulty": each.chance_if_faulty,
                }
                for name, each in self.evidence.items()
            ],
            "pairs": [asdict(pair) for pair in self.pairs()],
        }


def _facts(heard: Heard, keeps_texts: bool) -> dict[str, Any]:
    return {
        "error": heard.error,
        "finish_reasons": [answer.finish_reason for answer in heard.answers],
        "input_tokens": next((answer.input_tokens for answer in heard.answers), None),
        "output_tokens": sum(answer.output_tokens or 0 for answer in heard.answers),
        "characters": len(heard.text),
        **({"text": heard.text[:_LONGEST_TEXT]} if keeps_texts else {}),
    }


def _without_text(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "text"}
