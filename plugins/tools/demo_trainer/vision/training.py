"""How the demo model that sees is trained: first its eyes, then to put what they see in words.

Both take the time of a processor that they are given, and the learning rate follows it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from plugins.tools.demo_trainer.vision.drawings import COLOURS, KINDS, SHAPES, Drawing, draw
from plugins.tools.demo_trainer.vision.model import END, GRID, IMAGE, PAD, PATCH, SIDE, SPECIAL
from plugins.tools.demo_trainer.vision.optimizer import Muon
from plugins.tools.demo_trainer.vision.questions import Turn, turn, turn_without

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 48
IGNORED = -100
POOL = 12_000
"""How many drawings are kept to be shown again: drawing takes as long as learning from it."""
USES = 3
TALKS = 20
"""How many conversations are learned from together."""


@dataclass(frozen=True)
class Example:
    """A drawing as the network sees it, and what each of its parts shows."""

    drawing: Drawing
    pixels: np.ndarray[Any, Any]
    """Height, width and colour, of bytes."""
    kinds: np.ndarray[Any, Any]
    colours: np.ndarray[Any, Any]
    """For each part of the grid the kind and the colour from 1, or 0 for the ground."""


def example(drawing: Drawing) -> Example:
    image = drawing.image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    width, height = drawing.image.size
    middle = (np.arange(GRID) + 0.5) / GRID
    kinds, colours = np.zeros((GRID, GRID), np.int64), np.zeros((GRID, GRID), np.int64)
    for thing in drawing.things:
        across = (middle * width / height - thing.x)[None, :]
        near = np.hypot(across, (middle - thing.y)[:, None]) < thing.radius
        kinds[near] = KINDS.index(thing.kind) + 1
        colours[near] = COLOURS.index(thing.colour) + 1
    return Example(drawing, np.asarray(image), kinds.ravel(), colours.ravel())


def examples(random: Random) -> Iterator[Example]:
    """Yield drawings without end, each about as often as ``USES``."""
    kept: list[Example] = []
    while True:
        new = example(draw(random))
        if len(kept) < POOL:
            kept.append(new)
        else:
            kept[random.randrange(POOL)] = new
        yield new
        if len(kept) >= 500:
            for _ in range(USES - 1):
                yield random.choice(kept)


def mirrored(each: Example) -> Example:
    """Return what a mirror shows, if it has no digit; its drawing is left as it was."""
    if any(thing.kind not in SHAPES for thing in each.drawing.things):
        return each
    kinds, colours = (
        row.reshape(GRID, GRID)[:, ::-1].ravel() for row in (each.kinds, each.colours)
    )
    return Example(each.drawing, each.pixels[:, ::-1], kinds, colours)


def pixels_of(batch: list[Example]) -> Tensor:
    """Return a batch as the processor would make it, with a little noise."""
    import torch

    pixels = torch.from_numpy(np.stack([each.pixels for each in batch])).permute(0, 3, 1, 2)
    values = pixels.float() / 127.5 - 1
    return values + torch.randn_like(values) * 0.03 * torch.rand(len(batch), 1, 1, 1)


def rate(elapsed: float, peak: float) -> float:
    """Return the learning rate after this part of the time: it rises, then falls to zero."""
    warm = min(1.0, elapsed / 0.03 + 0.02)
    return peak * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed)))


def log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class PausedError(Exception):
    """The time of this run is over; what was learned is kept, and the next one goes on."""


@dataclass(frozen=True)
class Course:
    """Minutes of a processor that a part of the training takes, and where it is kept."""

    minutes: float
    peak: float
    file: Path
    seed: int = 0
    pause_at: float = math.inf
    """The time of ``time.monotonic`` when it is left for another run."""


def descend(
    network: Any,
    others: list[Any],
    loss_of: Callable[[], tuple[Tensor, str]],
    random: Random,
    course: Course,
) -> None:
    """Change what learns in a network, and others, so that a loss gets less."""
    import torch

    named = [(name, each) for name, each in network.named_parameters() if each.requires_grad]
    is_hidden = [each.dim() == 2 and ".layers." in name for name, each in named]
    hidden = [each for (_, each), inner in zip(named, is_hidden, strict=True) if inner]
    rest = [each for (_, each), inner in zip(named, is_hidden, strict=True) if not inner]
    muon = Muon(hidden)
    adam = torch.optim.AdamW([*rest, *others], betas=(0.9, 0.98), weight_decay=0.01)
    spent, step = 0.0, 0
    if course.file.exists():
        kept = torch.load(course.file)
        spent, step = kept["spent"], kept["step"]
        network.load_state_dict(kept["network"])
        muon.restore(kept["muon"])
        adam.load_state_dict(kept["adam"])
        with torch.no_grad():
            for each, value in zip(others, kept["others"], strict=True):
                each.copy_(value)
    # What goes on sees other drawings than what was there before.
    random.seed(f"{course.file.stem} {course.seed} {step}")
    torch.manual_seed(course.seed + step)

    def keep() -> None:
        torch.save(
            {
                "spent": spent, "step": step, "network": network.state_dict(), "others": others,
                "muon": muon.state(), "adam": adam.state_dict(),
            },
            course.file,
        )  # fmt: skip

    # By the processor's clock, since the machine may have other work.
    last = kept_at = time.process_time()
    while (elapsed := spent / 60 / course.minutes) < 1:
        muon.rate = rate(elapsed, course.peak)
        adam.param_groups[0]["lr"] = muon.rate / 2
        loss, words = loss_of()
        network.zero_grad()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        muon.step()
        adam.step()
        step += 1
        now = time.process_time()
        spent, last = spent + now - last, now
        if step % 20 == 0:
            log(f"{elapsed:5.1%}  step {step}  loss {loss.item():.3f}  {words}")
        if time.monotonic() > course.pause_at:
            keep()
            raise PausedError
        if now - kept_at > 30:
            kept_at = now
            keep()
    keep()


def _weights(count: int) -> Tensor:
    """Return how much each label counts: most parts are ground, which is easy."""
    import torch

    weights = torch.ones(count + 1)
    weights[0] = 0.3
    return weights


class Labels:
    """Two linear layers that say of each part what it shows; they are left out of the model."""

    def __init__(self, width: int) -> None:
        import torch

        self.kinds = torch.nn.Linear(width, len(KINDS) + 1)
        self.colours = torch.nn.Linear(width, len(COLOURS) + 1)

    def parameters(self) -> list[Any]:
        return [*self.kinds.parameters(), *self.colours.parameters()]

    def loss(self, seen: Tensor, batch: list[Example]) -> tuple[Tensor, str]:
        """Return the loss of a batch, whose parts' vectors these are, and the right shares."""
        import torch
        from torch.nn.functional import cross_entropy

        kinds = torch.from_numpy(np.stack([each.kinds for each in batch])).flatten()
        colours = torch.from_numpy(np.stack([each.colours for each in batch])).flatten()
        said, tones = self.kinds(seen).flatten(0, 1), self.colours(seen).flatten(0, 1)
        loss = cross_entropy(said, kinds, _weights(len(KINDS)))
        loss = loss + cross_entropy(tones, colours, _weights(len(COLOURS)))
        shown = kinds > 0
        right = (said.argmax(-1) == kinds)[shown].float().mean().item()
        toned = (tones.argmax(-1) == colours)[shown].float().mean().item()
        return loss, f"kinds {right:.2f} colours {toned:.2f}"


def see_simply(tower: Any, random: Random) -> None:
    """Let the tower begin with the main components of what patches show, and a plan of places.

    From random numbers it would take a good part of the time to find them.
    """
    import torch

    pixels = pixels_of([example(draw(random)) for _ in range(300)])
    patches = pixels.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * PATCH * PATCH)
    width = tower.config.hidden_size
    _, scales, components = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    # Fine details are rare, and as telling as what is common.
    strengths = (scales[:width] / len(rows) ** 0.5 + 0.05).reciprocal()
    filters = components[:width] * strengths[:, None] * 0.5
    places = torch.arange(GRID).float()
    waves = 1 / 20 ** (torch.arange(width // 4).float() / (width // 4))
    angles = places[:, None] * waves
    one = torch.cat([angles.sin(), angles.cos()], 1)
    both = torch.cat(
        [one[:, None].expand(GRID, GRID, -1), one[None].expand(GRID, GRID, -1)], 2
    ).reshape(GRID * GRID, width)
    embeddings = tower.embeddings
    with torch.no_grad():
        embeddings.patch_embedding.weight.copy_(filters.view(width, 3, PATCH, PATCH))
        embeddings.position_embedding.weight[1:].copy_(both * 0.5)


def train_eyes(network: Any, random: Random, course: Course) -> None:
    """Teach the vision tower to say of each part of a drawing which thing it belongs to."""
    tower = network.model.vision_tower
    labels = Labels(tower.config.hidden_size)
    source = examples(random)

    def loss_of() -> tuple[Tensor, str]:
        batch = [next(source) for _ in range(BATCH)]
        batch = [mirrored(each) if random.random() < 0.5 else each for each in batch]
        seen = tower(pixels_of(batch)).last_hidden_state[:, 1:]
        return labels.loss(seen, batch)

    descend(tower, labels.parameters(), loss_of, random, course)


def conversation(random: Random, drawings: list[Drawing]) -> list[tuple[int, Turn]]:
    """Return turns about drawings, each with the number of images that are shown in it."""
    if not drawings:
        return [(0, turn_without(random)) for _ in range(2)]
    found = []
    for drawing in drawings:
        turns = random.choice((1, 2)) if len(drawings) > 1 else random.choice((2, 3, 4))
        found += [(int(not at), turn(random, drawing, not at)) for at in range(turns)]
    return found


def tokens_of(
    random: Random, tokenizer: Any, turns: list[tuple[int, Turn]]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and its targets: what is not answered is ignored."""
    ids: list[int] = []
    targets: list[int] = []
    for images, (question, answer) in turns:
        marks = IMAGE * (GRID * GRID * images)
        # Our clients show the image before the question, and others after it.
        shown = f"{marks}{question}" if random.random() < 0.75 else f"{question}{marks}"
        asked = tokenizer.encode(f"User: {shown}\nAssistant:\n").ids
        said = tokenizer.encode(f"{answer}{END}").ids
        ids += asked + said
        targets += [IGNORED] * len(asked) + said
    return ids, targets


def _naming_loss(network: Any, tokenizer: Any, rows: Tensor, batch: list[Example]) -> Tensor:
    """Return how badly what the network reads of each part names its colour and its kind.

    So the words of an answer have only to be found among the parts, and need no other way to it.
    """
    import torch
    from torch.nn.functional import cross_entropy

    def tokens(words: Sequence[str]) -> Tensor:
        return torch.tensor([tokenizer.encode(f" {word}").ids[0] for word in words])

    grounds = tokens([each.drawing.background for each in batch])
    shown = torch.from_numpy(np.stack([each.colours for each in batch]))
    kinds = torch.from_numpy(np.stack([each.kinds for each in batch]))
    # The ground has no kind: only its colour is named, twice.
    is_ground, ground = shown == 0, grounds[:, None].expand_as(shown)
    colour_words = torch.where(is_ground, ground, tokens(COLOURS)[(shown - 1).clamp(0)])
    kind_words = torch.where(is_ground, ground, tokens(KINDS)[(kinds - 1).clamp(0)])
    logits = network.lm_head(rows)
    both = cross_entropy(logits, colour_words.flatten()) + cross_entropy(
        logits, kind_words.flatten()
    )
    return both / 2


def train_words(
    network: Any, tokenizer: Any, random: Random, course: Course, *, with_eyes: bool
) -> None:
    """Teach the network to answer; its eyes learn on, or stay as they are."""
    import torch
    from torch.nn.functional import cross_entropy

    tower = network.model.vision_tower
    tower.requires_grad_(with_eyes)
    labels = Labels(tower.config.hidden_size)
    source = examples(random)
    pad = SPECIAL.index(PAD)

    def loss_of() -> tuple[Tensor, str]:
        each = 2 if random.random() < 0.12 else 1
        rows, batch = [], []
        for _ in range(TALKS // each):
            shown = [next(source) for _ in range(0 if random.random() < 0.04 else each)]
            batch += shown
            turns = conversation(random, [one.drawing for one in shown])
            rows.append(tokens_of(random, tokenizer, turns))
        longest = max(len(ids) for ids, _ in rows)
        # What fills a row comes last, so nothing attends to it.
        ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
        targets = torch.tensor([t + [IGNORED] * (longest - len(t)) for _, t in rows])
        seen = tower(pixels_of(batch)).last_hidden_state[:, 1:]
        embeddings = network.get_input_embeddings()(ids)
        marks = (ids == SPECIAL.index(IMAGE)).unsqueeze(-1)
        rows_of_images = network.model.multi_modal_projector(seen).flatten(0, 1)
        embeddings = embeddings.masked_scatter(marks, rows_of_images)
        hidden = network.model.language_model(inputs_embeds=embeddings, use_cache=False)[0]
        is_asked = targets[:, 1:] != IGNORED
        logits = network.lm_head(hidden[:, :-1][is_asked])
        expected = targets[:, 1:][is_asked]
        loss = cross_entropy(logits, expected)
        loss = loss + 0.3 * _naming_loss(network, tokenizer, rows_of_images, batch)
        words = f"tokens {(logits.argmax(-1) == expected).float().mean().item():.3f}"
        if with_eyes:
            labelled, more = labels.loss(seen, batch)
            return loss + 0.5 * labelled, f"{words} {more}"
        return loss, words

    descend(network, labels.parameters() if with_eyes else [], loss_of, random, course)
