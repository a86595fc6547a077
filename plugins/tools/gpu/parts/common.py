"""What the parts share: their arguments, the models they serve, and how time is measured."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.tools.gpu.results import Results


@dataclass(frozen=True)
class Settings:
    device: str
    quick: bool
    """Small shapes and few repetitions: does it run at all?"""
    folder: Path
    """For models and repositories."""
    results: Results

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"


def settings() -> Settings:
    """Read the command line of a part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    return Settings(args.device, args.quick, args.folder, Results(args.results))


def save(model: Any, folder: Path) -> Path:
    """Write the model and a tokenizer with a word for every token; return the folder."""
    from plugins.tools.bench.shapes import save_tokenizer

    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.get_text_config().vocab_size)
    return folder


def synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started
