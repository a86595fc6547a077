"""Whether a model fits into this machine, before anything of it is loaded; and what would."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from llmserve.builder.adapters import with_adapters
from llmserve.builder.plan import BuildSpec, Plan, make_plan
from llmserve.builder.progress import Note
from llmserve.builder.size import size_of, with_draft
from llmserve.errors import LLMServeError, OutputError, ShortageError
from llmserve.hardware import addresses, gpu_memory, memory
from llmserve.plugins.options import Value
from llmserve.plugins.registry import Registry
from llmserve.plugins.size import ModelSize, Needs, needs_with_draft
from llmserve.texts import in_gb

_NAMED = 2
"""How many ways out a message names."""
_WORTH_SAYING = 10**9
"""Bytes of memory from which on a build says what the model takes."""
_WORTH_CHOOSING = 10**8
"""Bytes of weights from which on it is said which of them could be fewer."""
_READER = 700_000_000
"""What the reader of GGUF files takes beside the model, which it has in 16 bits (measured)."""
_LIBRARIES = 1_700_000_000
"""What libraries take of an address space (measured with torch, transformers and OpenVINO)."""
_ALLOWED = "is what ulimit -v allows"


@dataclass(frozen=True)
class Left:
    """The bytes that a machine has left; ``addressable`` are those that one process may have.

    ``of_gpu`` are those of the GPU with most, and ``of_gpus`` those of all together.
    """

    free: float = inf
    addressable: float = inf
    of_gpu: float = inf
    of_gpus: float = inf
    on_disk: float = inf

    @classmethod
    def here(cls, output: Path) -> Left:
        """Return what is left here, and on the disk of a folder that need not be there yet."""
        gpus = [gpu.free for gpu in gpu_memory()]
        return cls(
            memory().free,
            addresses(),
            max(gpus, default=inf),
            sum(gpus) if gpus else inf,
            _free_disk(output.absolute()),
        )


def _free_disk(folder: Path) -> float:
    """Return what is free where a folder is, or will be; the build says if it cannot be there."""
    for path in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(path).free
    return inf


@dataclass(frozen=True)
class Lack:
    """What there is too little of."""

    what: str
    needed: float
    available: float
    left: str

    def __str__(self) -> str:
        return f"{self.what} needs {in_gb(self.needed)}, and {in_gb(self.available)} {self.left}"


@dataclass(frozen=True)
class Choice:
    """A way to build a model, and what it takes if that is known."""

    spec: BuildSpec
    needs: Needs = field(default_factory=Needs)
    changes: Mapping[str, Value] = field(default_factory=dict)
    """The options that are not as asked for."""
    plugin: str = ""
    """The plugin, if it is another one than would be used."""

    def chosen(self) -> dict[str, Value]:
        """Return what is not as asked for, the plugin too."""
        return {**({"plugin": self.plugin} if self.plugin else {}), **self.changes}

    def __str__(self) -> str:
        plugin = [f"--plugin {self.plugin}"] if self.plugin else []
        return " ".join([*plugin, *(f"--set {key}={value}" for key, value in self.changes.items())])


def needs_of(plan: Plan, size: ModelSize) -> Needs | None:
    """Return what a model takes; None if its generator does not say."""
    if plan.generator.needs is None:
        return None
    with plan.errors_of("generator", "needs"):
        needs = needs_with_draft(plan.generator.needs, size, plan.options)
    if not size.is_gguf or plan.generator.keeps_gguf(plan.options):
        return needs
    # It is converted to a checkpoint of 16 bits first.
    converted = 2 * size.parameters
    return replace(needs, build=max(needs.build, _READER + converted), disk=needs.disk + converted)


def lack(needs: Needs, left: Left, *, serves: bool) -> Lack | None:
    """Return what there is too little of to build a model and, if it is to be, to serve it."""
    built, served = needs.build, needs.served
    # Each copy is a process of its own.
    of_copy = served // max(1, needs.instances)
    candidates = [
        Lack("building it", built, left.free, "are free"),
        Lack("building it", built and built + needs.reads + _LIBRARIES, left.addressable, _ALLOWED),
    ]
    if serves:
        what = f"serving it ({parts_of(needs)})"
        candidates += [
            Lack(what, served, left.free, "are free"),
            Lack(what, needs.of_gpu, left.of_gpus, "are free on all GPUs")
            if needs.on_all_gpus
            else Lack(what, needs.of_gpu, left.of_gpu, "are free on the GPU"),
            Lack(what, of_copy and of_copy + needs.mapped + _LIBRARIES, left.addressable, _ALLOWED),
        ]
    lacking = [each for each in candidates if each.needed > each.available]
    return max(lacking, key=lambda each: each.needed / max(1.0, each.available), default=None)


def parts_of(needs: Needs) -> str:
    """Say what the memory of a served model is for."""
    cache = f", {needs.cached} {in_gb(needs.cache)}" if needs.cached else ""
    copies = f"{needs.instances} copies, each with " if needs.instances > 1 else ""
    adapters = f", its adapters {in_gb(needs.adapters)}" if needs.adapters else ""
    process = f", its process {in_gb(needs.process)}"
    return f"{copies}weights {in_gb(needs.weights)}{cache}{adapters}{process}"


def fit_spec(
    spec: BuildSpec,
    registry: Registry,
    *,
    serves: bool,
    change: bool | None,
    report: Callable[[str], None],
) -> Choice:
    """Return how to build a model so that it fits into this machine: as asked for, if it does.

    What does not fit is refused, with what would, unless ``change`` lets that be taken; with None,
    what does not fit is built nevertheless. ``serves`` is whether this machine serves it as well.
    """
    plan = make_plan(spec, registry)
    if plan.generator.needs is None:
        # The hub is not asked in vain, perhaps for what is no name of a model there.
        return Choice(spec)
    size = size_of(
        spec.model,
        revision=str(plan.options["revision"]),
        weights=plan.generator.weights,
        report=report,
    )
    size = size and with_draft(size, plan.options, report=report)
    size = size and with_adapters(size, plan.options, report=report)
    choices = [] if size is None else list(_choices(spec, registry, size))
    if size is None or not choices:
        return Choice(spec)
    asked, left = choices[0], Left.here(spec.output)
    if full := _full_disk(asked, left):
        if change is not None:
            raise full
        report(Note(f"note: {full.problem}"))
    if (lacking := lack(asked.needs, left, serves=serves)) is None:
        if max(asked.needs.build, asked.needs.served) >= _WORTH_SAYING:
            report(_in_words(asked.needs, left))
        if serves and (trade := _trade(choices)):
            report(trade)
        return asked
    if change is None:
        report(Note(f"note: {lacking}: it may fail, or be killed"))
        return asked
    choices += _of_others(spec, registry, size)
    fitting = [each for each in choices if lack(each.needs, left, serves=serves) is None]
    if fitting and change:
        report(f"chosen: {fitting[0]}, since otherwise {lacking}")
        report(_in_words(fitting[0].needs, left))
        return fitting[0]
    raise ShortageError(f"{spec.model}: {lacking}", hint=_hint(fitting, choices, serves=serves))


def ways_to_build(model: str, registry: Registry) -> list[Choice]:
    """Return the ways to build a model that suit this machine, each with what it takes.

    Those are its plugins, with their defaults, and with one change that makes the weights smaller.
    """
    if (size := size_of(model)) is None:
        return []
    found = _of_others(BuildSpec("", model), registry, size)
    plain = {choice.plugin: choice.needs for choice in found if not choice.changes}
    return [
        choice
        for choice in found
        if not choice.changes
        or (len(choice.changes) == 1 and choice.needs.weights < plain[choice.plugin].weights)
    ]


def _of_others(spec: BuildSpec, registry: Registry, size: ModelSize) -> list[Choice]:
    """Return ways to build it with the other plugins that suit the device, the best one first."""
    with suppress(LLMServeError):
        recipes, _ = registry.recipes_for(str(spec.options.get("device", "auto")))
        return [
            choice
            for recipe in recipes
            if recipe.name != spec.plugin
            for choice in _choices(replace(spec, plugin=recipe.name), registry, size, recipe.name)
        ]
    return []


def _choices(
    spec: BuildSpec, registry: Registry, size: ModelSize, plugin: str = ""
) -> Iterator[Choice]:
    """Yield ways to build a model with a plugin: as asked for, then smaller ones."""
    try:
        plan = make_plan(spec, registry)
    except LLMServeError:
        # What is asked for makes no sense for this plugin.
        return
    if (needs := needs_of(plan, size)) is None:
        return
    yield Choice(spec, needs, plugin=plugin)
    for changes in needs.instead:
        # What a user has asked for stays.
        if changes.keys() & spec.options.keys():
            continue
        other = replace(spec, options={**spec.options, **changes})
        if found := needs_of(make_plan(other, registry), size):
            yield Choice(other, found, changes, plugin)


def _full_disk(choice: Choice, left: Left) -> OutputError | None:
    if choice.needs.disk <= left.on_disk:
        return None
    return OutputError(
        f"{choice.spec.model} takes {in_gb(choice.needs.disk)} of the disk of "
        f"{choice.spec.output}, which has {in_gb(left.on_disk)} free",
        hint="make some space, build to another disk, or try it with --no-fit",
    )


def _in_words(needs: Needs, left: Left) -> str:
    on_gpu = f", and {in_gb(needs.of_gpu)} of the GPU's" if needs.on_gpu else ""
    return (
        f"building it takes up to {in_gb(needs.build)} of memory, and serving it "
        f"{in_gb(needs.served)}{on_gpu} ({parts_of(needs)}); {in_gb(left.free)} are free"
    )


def _trade(choices: Sequence[Choice]) -> str:
    """Say what would make the weights smaller, for answers that differ; nothing if none would."""
    asked = choices[0]
    smaller = [each for each in choices if each.needs.weights < asked.needs.weights]
    if not smaller or asked.needs.weights < _WORTH_CHOOSING:
        return ""
    other = max(smaller, key=lambda each: each.needs.weights)
    return (
        f"its weights take {in_gb(asked.needs.weights)} of memory, and with {other} "
        f"{in_gb(other.needs.weights)} with other answers: llmserve compare --model "
        f"{shlex.quote(asked.spec.model)} measures what that gains and loses"
    )


def _hint(fitting: Sequence[Choice], choices: Sequence[Choice], *, serves: bool) -> str:
    """Name what fits, or what comes closest."""

    def takes(choice: Choice) -> str:
        return in_gb(most(choice.needs, serves=serves))

    if fitting:
        named = ", or ".join(f"{each} takes {takes(each)}" for each in fitting[:_NAMED])
        return f"{named}; --fit takes the first, and --no-fit tries it as it is"
    smallest = min(choices, key=lambda each: most(each.needs, serves=serves))
    least = (
        f"even {smallest} takes {takes(smallest)}" if str(smallest) else "no option makes it fit"
    )
    return f"{least}: use a larger machine or a smaller model, or try it with --no-fit"


def most(needs: Needs, *, serves: bool) -> float:
    """Return the most memory that it takes, of the machine or of a GPU."""
    return max(needs.build, needs.served, needs.of_gpu) if serves else needs.build
