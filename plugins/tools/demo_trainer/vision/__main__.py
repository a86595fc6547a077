"""Train the demo model that sees, and write it as a folder that transformers loads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from plugins.tools.demo_trainer.vision.drawings import draw
from plugins.tools.demo_trainer.vision.model import (
    go_on,
    new_network,
    save_network,
    save_processor,
    train_tokenizer,
)
from plugins.tools.demo_trainer.vision.questions import turn, turn_without
from plugins.tools.demo_trainer.vision.training import (
    Course,
    PausedError,
    log,
    see_simply,
    train_eyes,
    train_words,
)

SEED = 62
# Of a processor's minutes, and how fast each part learns.
EYES, WORDS, BOTH = (14.0, 3e-3), (0.5, 3e-3), (16.0, 2e-3)
TOKENIZER_DRAWINGS = 800


def texts(random: Random) -> Iterator[str]:
    """Yield what the tokenizer learns its words from."""
    for _ in range(TOKENIZER_DRAWINGS):
        drawing = draw(random)
        for question, answer in (*(turn(random, drawing) for _ in range(4)), turn_without(random)):
            yield f"User: {question}\nAssistant:\n{answer}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m plugins.tools.demo_trainer.vision", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--kept", type=Path, required=True, help="a folder for what is half done")
    parser.add_argument(
        "--start", type=Path, metavar="FOLDER", help="a model to go on from; default: nothing"
    )
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time; default: 1")
    parser.add_argument(
        "--pause-after", type=float, default=float("inf"), metavar="SECONDS",
        help="stop then; the same command goes on from there",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    pause_at = time.monotonic() + options.pause_after
    for folder in (options.output, options.kept):
        folder.mkdir(parents=True, exist_ok=True)
    random = Random(options.seed)
    tokenizer = train_tokenizer(texts(random))
    save_processor(tokenizer, options.output)
    network = new_network()
    if options.start:
        go_on(network, tokenizer, options.start)
    else:
        see_simply(network.model.vision_tower, random)

    def course(name: str, minutes: float, peak: float) -> Course:
        file = options.kept / f"{name}.pt"
        return Course(minutes * options.scale, peak, file, options.seed, pause_at)

    try:
        train_eyes(network, random, course("eyes", *EYES))
        train_words(network, tokenizer, random, course("words", *WORDS), with_eyes=False)
        train_words(network, tokenizer, random, course("both", *BOTH), with_eyes=True)
    except PausedError:
        log("paused: the same command goes on")
    save_network(network, options.output)


if __name__ == "__main__":
    main()
