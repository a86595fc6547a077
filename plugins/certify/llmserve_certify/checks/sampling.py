"""Whether the options of sampling do what they say, and are not accepted and ignored.

Options that should leave only the likeliest token are tested by answers that must then equal the
one without chance, so there is no false alarm by chance; a note says how likely a fault goes
unseen. The distribution of first tokens is tested at an error rate of one in ten thousand, which
holds for the model's own weights: rounded to integers, they are another distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import comb, sqrt
from typing import Any

from llmserve.plugin import Check
from llmserve_certify.endpoint import Ask, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided
from llmserve_certify.reference import Adjust, greedy

HOT = 2.0
"""A temperature at which even a confident model is undecided."""
_SAMPLES = 8
_TOKENS = 12
_DRAWS = 128
_ALPHA = 1e-4
_INTEGERS = ("int8", "int4")
_SIMULATED = 50_000
_AT_ONCE = 16
_BESIDE = "with the same seed when others run beside it"
_SEEDS = 4
_TELLING_TOKENS = 12
"""So many first tokens must depend on the seed, or chance could hide that it is not kept."""
_FEW = 8
"""Of so few tokens the seed still chooses others, and rounding hardly ever."""
_TELLING = 2
"""The prompts whose answers a penalty has to change, if there are so many."""
_PENALTY = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.8}


def _hot(exam: Examination) -> tuple[list[Ask], list[Reply]]:
    """Return answers at a high temperature, asked only once."""
    exam.offer("temperature", HOT)
    asks = [exam.greedy(exam.prompts[n % 4], _TOKENS, temperature=HOT) for n in range(_SAMPLES)]
    if "hot" not in exam.kept:
        exam.kept["hot"] = exam.together(asks, most=4)
    return asks, exam.kept["hot"]


def _plain(exam: Examination, ask: Ask) -> Reply:
    return exam.alone(exam.greedy(ask.prompt, _TOKENS))


def _temperature(exam: Examination) -> None:
    asks, answers = _hot(exam)
    same = sum(a.text == _plain(exam, ask).text for ask, a in zip(asks, answers, strict=True))
    if same == len(asks):
        words = f"temperature={HOT} is accepted and has no effect on {same} answers"
        raise Broken(words, expected="other answers", got=answers[0].text, ask=asks[0])
    exam.note(f"{len(asks) - same} of {len(asks)} answers differ from the likeliest one")


def _narrowed(option: str, value: Any) -> Callable[[Examination], None]:
    """Return a test of an option that should leave only the likeliest token."""

    def run(exam: Examination) -> None:
        exam.offer(option, value, temperature=HOT)
        asks, free = _hot(exam)
        same = sum(a.text == _plain(exam, ask).text for ask, a in zip(asks, free, strict=True))
        if same == len(asks):
            raise Undecided("without the option, all answers are the likeliest one already")
        narrow = [ask.with_options(**{option: value}) for ask in asks]
        other = []
        for ask, answer in zip(narrow, exam.together(narrow, most=4), strict=True):
            likeliest = _plain(exam, ask)
            if answer.text != likeliest.text and not exam.is_tie(ask, answer):
                other.append((ask, likeliest, answer))
        # Those to one prompt may differ by rounding where no model is there to ask.
        allowed = 0 if exam.reference else 1
        if len({ask.prompt for ask, _, _ in other}) > allowed:
            ask, likeliest, answer = other[0]
            raise Broken(
                f"{option}={value} leaves only the likeliest token, and {len(other)} of "
                f"{len(asks)} answers have others: it is accepted and ignored",
                expected=likeliest.text,
                got=answer.text,
                ask=ask,
            )
        prompts, share = {ask.prompt for ask in asks}, max(same, 1) / len(asks)
        alike = share ** (len(asks) / len(prompts))
        unseen = _at_most(allowed, len(prompts), 1 - alike)
        exam.note(
            f"without it, {same} of {len(asks)} answers are the likeliest one; that it is ignored "
            f"goes unseen with a probability of {unseen:.1g}"
        )

    return run


def _at_most(most: int, number: int, chance: float) -> float:
    """Return the probability that at most so many of a number of answers differ."""
    ways = (comb(number, n) * chance**n * (1 - chance) ** (number - n) for n in range(most + 1))
    return sum(ways)


def _seed(exam: Examination) -> None:
    exam.offer("seed", 7, temperature=HOT)
    asks = [exam.greedy(p, _TOKENS, temperature=HOT, seed=7) for p in exam.prompts[:4]]
    first = [exam.alone(ask) for ask in asks]
    reseeded = [ask.with_options(seed=n) for n, ask in enumerate(asks * 2, 100)]
    others = exam.together(reseeded, most=exam.at_once)
    if all(a.text == first[n % 4].text for n, a in enumerate(others)):
        raise Undecided("other seeds give the same answers, so nothing can be seen")
    again = exam.together(asks * 2, most=exam.at_once)
    differing = [n for n, a in enumerate(again) if a.text != first[n % 4].text]
    if len(differing) > (0 if exam.precision == "float32" else 3):
        at = differing[0]
        raise Broken(
            f"{len(differing)} of {len(again)} answers differ although the seed is the same",
            expected=first[at % 4].text,
            got=again[at].text,
            ask=asks[at % 4],
        )
    if exam.exact or exam.precision == "float32":
        beside = [exam.greedy(p, _TOKENS) for p in exam.prompts[4:]]
        together = exam.together([*asks, *beside])[: len(asks)]
        exam.expect_each(asks, first, together, _BESIDE)
    else:
        _same_first_tokens(exam)


def _same_first_tokens(exam: Examination) -> None:
    """Compare first tokens, few of which rounding changes, although it changes most whole answers.

    Beside others a server adds in another order. At a high temperature thousands of tokens are
    about as likely as the one that is drawn, so that the smallest change of a score makes it
    another one, and all that follow. Of a few tokens (top_k), still fewer draws change.
    """
    options = {"temperature": 1.0, **_offered(exam, top_k=_FEW)}
    asks = [exam.greedy(p, 1, seed=n, **options) for p in exam.prompts for n in range(_SEEDS)]
    alone = [exam.alone(ask).text for ask in asks]
    other_seeds = [alone[n - n % _SEEDS : n - n % _SEEDS + _SEEDS] for n in range(len(asks))]
    by_chance = sum(
        sum(other != text for other in others) / (_SEEDS - 1)
        for text, others in zip(alone, other_seeds, strict=True)
    )
    if by_chance < _TELLING_TOKENS:
        raise Undecided(
            f"only {by_chance:.0f} of {len(asks)} first tokens depend on the seed, and more of an "
            f"answer is rounded differently in {exam.precision} when others run beside it"
        )
    beside = exam.together(asks)
    differing = [n for n, answer in enumerate(beside) if answer.text != alone[n]]
    exam.figures |= {"first tokens": len(asks), "others": len(differing)}
    words = f"{len(differing)} of {len(asks)} first tokens differ {_BESIDE}"
    half = by_chance / 2
    # Where no seed is kept, hardly ever fewer differ than this.
    least = by_chance - 3 * sqrt(by_chance * (1 - by_chance / len(asks)) + 3)
    if len(differing) > max(half, least):
        at = differing[0]
        raise Broken(
            f"{words}; other seeds change {by_chance:.0f}, and rounding few",
            expected=alone[at],
            got=beside[at].text,
            ask=asks[at],
        )
    if len(differing) > half:
        raise Undecided(
            f"{words}, and other seeds change {by_chance:.0f}: some samplers turn small changes "
            "of the scores into many of the text"
        )
    if differing:
        exam.note(f"{words}, which rounding explains: other seeds change {by_chance:.0f}")


def _subtract(option: str, size: float) -> Adjust:
    """Return what a penalty does to the scores, as OpenAI's API and transformers define it."""

    def adjust(scores: Any, answer: Sequence[int]) -> Any:
        changed = scores.copy()
        for token, times in Counter(answer).items():
            changed[token] -= size * (times if option == "frequency_penalty" else 1)
        return changed

    return adjust


def _divide(prompt: Sequence[int], size: float) -> Adjust:
    def adjust(scores: Any, answer: Sequence[int]) -> Any:
        changed = scores.copy()
        for token in {*prompt, *answer}:
            value = changed[token]
            changed[token] = value / size if value > 0 else value * size
        return changed

    return adjust


def _penalty(option: str) -> Callable[[Examination], None]:
    size = _PENALTY[option]

    def run(exam: Examination) -> None:
        exam.offer(option, size)
        prompts = [*_telling(exam, option), *exam.prompts[:4]][:4]
        asks = [exam.greedy(prompt, 2 * _TOKENS, **{option: size}) for prompt in prompts]
        plain = [exam.alone(exam.greedy(prompt, 2 * _TOKENS)) for prompt in prompts]
        answers = exam.together(asks, most=2)
        changed = [a.text != p.text for a, p in zip(answers, plain, strict=True)]
        if exam.reference is not None:
            for ask, answer, before in zip(asks, answers, plain, strict=True):
                _check_penalty(exam, option, ask, answer, before)
        if not any(changed):
            raise Undecided(f"{option}={size} changes none of {len(asks)} answers")
        exam.note(f"it changes {sum(changed)} of {len(asks)} answers")

    return run


def _telling(exam: Examination, option: str) -> list[str]:
    """Return prompts whose likeliest answers a penalty changes, as far as the model is there."""
    found: list[str] = []
    for prompt in exam.prompts if exam.reference else ():
        ids = exam.model.encode(prompt)
        free = greedy(exam.model, ids, 2 * _TOKENS)
        if greedy(exam.model, ids, 2 * _TOKENS, adjust=_adjusted(option, ids)) != free:
            found.append(prompt)
        if len(found) == _TELLING:
            break
    return found


def _adjusted(option: str, prompt: Sequence[int]) -> Adjust:
    size = _PENALTY[option]
    if option == "repetition_penalty":
        return _divide(prompt, size)
    return _subtract(option, size)


def _check_penalty(exam: Examination, option: str, ask: Ask, answer: Reply, plain: Reply) -> None:
    model = exam.model
    ids, size = exam.ids_of(ask), _PENALTY[option]
    adjust = _adjusted(option, ids)
    # What a division does to the noise of rounding, it does to a tie.
    margin = exam.margin * (size if option == "repetition_penalty" else 1)
    if exam.is_explained(exam.walk(ask, answer, adjust=adjust), margin):
        return
    wanted, _ = greedy(model, ids, 2 * _TOKENS, adjust=adjust)
    expected = model.decode(ids, wanted)
    ignored = answer.text == plain.text
    words = "is accepted and ignored" if ignored else "has another effect than it is defined to"
    raise Broken(f"{option}={size} {words}", expected=expected, got=answer.text, ask=ask)


def _logit_bias(exam: Examination) -> None:
    import numpy as np

    model = exam.model
    prompt = exam.prompts[0]
    ids = model.encode(prompt)
    order = [int(token) for token in np.argsort(-np.asarray(model.scores(ids)))]
    token = next(t for t in order[3:] if t not in model.ends and _is_plain(model.decode(ids, [t])))
    exam.offer("logit_bias", {str(token): 100.0})
    ask = exam.greedy(prompt, 3, logit_bias={str(token): 100.0})
    answer = exam.ask(ask)
    expected = model.decode(ids, [token] * 3)
    if answer.text.strip() != expected.strip():
        ignored = answer.text == exam.alone(exam.greedy(prompt, 3)).text
        words = "is accepted and ignored" if ignored else "has another effect than it is defined to"
        raise Broken(
            f"a logit_bias of 100 for {model.decode(ids, [token])!r} {words}",
            expected=expected,
            got=answer.text,
            ask=ask,
        )


def _is_plain(text: str) -> bool:
    return text.strip().isalpha() and text.isascii()


def _distribution(exam: Examination) -> None:
    """Compare the first tokens of many answers with the model's probabilities."""
    import numpy as np

    model = exam.model
    exam.offer("temperature", 1.0)
    prompt = max(exam.prompts, key=lambda p: _entropy(np.asarray(model.scores(model.encode(p)))))
    ids = model.encode(prompt)
    options: dict[str, Any] = {"temperature": 1.0, **_unrestricted(exam)}
    ask = exam.greedy(prompt, 1, **options)
    drawn = Counter(a.text.strip() for a in exam.together([ask] * _DRAWS, most=_AT_ONCE))
    expected = _first_texts(exam, ids)
    texts = [text for text, share in expected.items() if share * _DRAWS >= 1 and text]
    shares = np.array([expected[text] for text in texts])
    rest = max(0.0, 1 - float(shares.sum()))
    counts = np.array([*(drawn[text] for text in texts), 0])
    counts[-1] = _DRAWS - counts.sum()
    chances = np.array([*shares, rest])
    chances /= chances.sum()
    probability = _tail(counts, chances)
    exam.figures |= {"draws": _DRAWS, "kinds": len(counts), "probability": round(probability, 5)}
    if probability < _ALPHA:
        if exam.precision in _INTEGERS:
            raise Undecided(
                f"first tokens at temperature=1 are not drawn as the model says (probability "
                f"{probability:.1g}): weights in {exam.precision} may be why"
            )
        usual = {text: round(expected[text] * _DRAWS, 1) for text in texts[:8]}
        raise Broken(
            f"first tokens at temperature=1 are not drawn as the model says (probability "
            f"{probability:.1g}; a false alarm is one in {1 / _ALPHA:.0f})",
            expected=usual,
            got=dict(drawn.most_common(8)),
            ask=ask,
        )


def _unrestricted(exam: Examination) -> Mapping[str, Any]:
    """Return what switches off limits that a server may set by itself."""
    return _offered(exam, top_p=1.0, top_k=0, min_p=0.0)


def _offered(exam: Examination, **options: Any) -> dict[str, Any]:
    """Return those of some options that are not refused."""
    found = {}
    for option, value in options.items():
        try:
            exam.offer(option, value)
        except NotOffered:
            continue
        found[option] = value
    return found


def _first_texts(exam: Examination, ids: Sequence[int]) -> dict[str, float]:
    import numpy as np

    model = exam.model
    scores = np.asarray(model.scores(ids), dtype=np.float64)
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    texts: Counter[str] = Counter()
    for token in map(int, np.argsort(-chances)[:500]):
        text = "" if token in model.ends else model.decode(ids, [token])
        # Of half a character, servers send nothing or a mark.
        texts["" if "\ufffd" in text else text.strip()] += float(chances[token])  # type: ignore[assignment]
    return dict(sorted(texts.items(), key=lambda item: -item[1]))


def _entropy(scores: Any) -> float:
    import numpy as np

    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    return float(-(chances * np.log(chances + 1e-30)).sum())


def _tail(counts: Any, chances: Any) -> float:
    """Return the probability of counts at least as unlikely as these, by simulation."""
    import numpy as np

    def unlikely(rows: Any) -> Any:
        usual = chances * rows.sum(axis=-1, keepdims=True)
        return ((rows - usual) ** 2 / np.maximum(usual, 1e-9)).sum(axis=-1)

    generator, found, probability = np.random.default_rng(1), unlikely(counts), 1.0
    for number in (_SIMULATED // 25, _SIMULATED):
        rows = generator.multinomial(counts.sum(), chances, size=number)
        probability = (int((unlikely(rows) >= found).sum()) + 1) / (number + 1)
        if probability > 100 * _ALPHA:
            break
    return probability


_BATCH = ("no-foreign-text", "own-answer", "own-length", "same-in-a-batch", "repeatable")
_ALWAYS = ("begin-token", "greedy-is-the-models", *_BATCH)

CHECKS = (
    Check(
        name="temperature",
        severity="major",
        promise="a high temperature gives other answers than the likeliest",
        meaning="every user gets the same answer, whatever they choose",
        run=_temperature,
    ),
    Check(
        name="seed",
        severity="major",
        promise="the same seed gives the same text, whatever runs beside it",
        meaning="sampled results cannot be repeated",
        run=_seed,
        follows=_BATCH,
    ),
    Check(
        name="top-p",
        severity="major",
        promise="top_p near 0 leaves only the likeliest token",
        meaning="answers are wilder than asked for",
        run=_narrowed("top_p", 1e-5),
        follows=_ALWAYS,
    ),
    Check(
        name="top-k",
        severity="minor",
        promise="top_k=1 leaves only the likeliest token",
        meaning="answers are wilder than asked for",
        run=_narrowed("top_k", 1),
        follows=_ALWAYS,
        quick=False,
    ),
    Check(
        name="min-p",
        severity="minor",
        promise="min_p=1 leaves only the likeliest token",
        meaning="answers are wilder than asked for",
        run=_narrowed("min_p", 1.0),
        follows=_ALWAYS,
        quick=False,
    ),
    *(
        Check(
            name=option.replace("_", "-"),
            severity="minor" if option == "repetition_penalty" else "major",
            promise=f"{option} changes the scores as it is defined to",
            meaning="answers repeat themselves although the user forbade it",
            run=_penalty(option),
            follows=_ALWAYS,
            quick=False,
        )
        for option in _PENALTY
    ),
    Check(
        name="logit-bias",
        severity="major",
        promise="logit_bias decides which token comes",
        meaning="tokens that a program forbids or demands come or stay away as before",
        run=_logit_bias,
        needs=("reference",),
        follows=_ALWAYS,
        quick=False,
    ),
    Check(
        name="sampling-distribution",
        severity="major",
        promise="at temperature 1, tokens are drawn with the model's probabilities",
        meaning="the server samples from another distribution than the user chose",
        run=_distribution,
        needs=("reference",),
        follows=(*_ALWAYS, "temperature"),
        quick=False,
    ),
)
