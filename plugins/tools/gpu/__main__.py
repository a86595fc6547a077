"""Says what is true on this machine's GPU; on a CPU it checks itself with small shapes.

    python -m plugins.tools.gpu [--bundle build/gpu-bundle] [--out build/gpu] [--device cpu --quick]

With a bundle it needs no network, and of this Python only torch and transformers. The parts run one
after the other, each in a process of its own for a bounded time, and what a part found is in a file
as soon as it is there: ``report.md`` is written anew after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .environment import SetupError, create
from .results import PROFILE, Row, markdown, read

ROOT = Path(__file__).parents[3]
_TOTAL = 20 * 60
"""Seconds for all parts together."""
_FACTS = """
import json, platform, sys
from importlib.metadata import version
import torch
names = "torch", "transformers", "numpy", "llmserve", "nvidia-pytriton"
facts = {"Python": platform.python_version(), **{name: version(name) for name in names}}
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    facts["card"] = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    facts["CUDA of torch"] = torch.version.cuda
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Part:
    module: str
    what: str
    seconds: int
    """The most that it may take."""


# In the order of value: what runs last may not run at all.
PARTS = (
    Part("exact", "hf and iterative through Triton", 420),
    Part("engine", "The engine of iterative, without Triton", 480),
    Part("streams", "Streams through Triton", 240),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="What `make gpu-bundle` wrote.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="Small shapes, one round.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", help="Parts, separated by commas.")
    args = parser.parse_args(arguments)
    # The parts run in folders of their own.
    args.out = args.out.resolve()
    parts = [part for part in PARTS if not args.only or part.module in args.only.split(",")]
    if not parts:
        parser.error(f"choose from {', '.join(part.module for part in PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for pattern in ("report.md", "*.jsonl", "*.log", PROFILE):
        for old in args.out.glob(pattern):
            old.unlink()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        python, path = Path(sys.executable), str(ROOT)
        if args.bundle:
            try:
                python = create(args.bundle, Path(scratch, "environment"))
            except SetupError as error:
                sys.exit(f"error: {error}")
            # Only the tools come from the checkout; llmserve is what the bundle brought.
            tools = Path(scratch, "checkout", "plugins", "tools")
            tools.parent.mkdir(parents=True)
            tools.symlink_to(ROOT / "plugins" / "tools")
            path = str(Path(scratch, "checkout"))
        report = Report(args.out / "report.md", python, time.monotonic() - started)
        for part in parts:
            left = _TOTAL - (time.monotonic() - started)
            print(f"{part.what}:", flush=True)
            report.add(part, run(part, args, python, path, Path(scratch, part.module), left))
    print(f"{args.out / 'report.md'} after {time.monotonic() - started:.0f} s")
    return 0 if report.ok else 1


def run(
    part: Part, args: argparse.Namespace, python: Path, path: str, folder: Path, left: float
) -> tuple[list[Row], str]:
    """Run a part; return what it found, and why it ended early or ``""``."""
    seconds = min(part.seconds, left)
    if seconds <= 0:
        return [], "no time was left"
    folder.mkdir()
    results = args.out / f"{part.module}.jsonl"
    command = [
        str(python), "-m", f"plugins.tools.gpu.parts.{part.module}",
        f"--device={args.device}", f"--folder={folder}", f"--results={results}",
        *(["--quick"] if args.quick else []),
    ]  # fmt: skip
    log = args.out / f"{part.module}.log"
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w", encoding="utf-8") as file:
        try:
            ended = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder,
                timeout=seconds, check=False,
            ).returncode  # fmt: skip
            problem = f"it ended with {ended}: {last_line(log)}" if ended else ""
        except subprocess.TimeoutExpired:
            problem = f"it was ended after {seconds:.0f} s"
    profile = folder / PROFILE
    if profile.exists():
        shutil.copyfile(profile, args.out / profile.name)
    return read(results), problem


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "its log is empty"


class Report:
    """A page that is complete after each part."""

    def __init__(self, file: Path, python: Path, setup: float) -> None:
        self.ok = True
        self._file = file
        self._texts = [
            f"# What is true on this machine\n\n{facts(python)}\n\nSet up in {setup:.0f} s."
        ]
        self._write()

    def add(self, part: Part, outcome: tuple[list[Row], str]) -> None:
        rows, problem = outcome
        self.ok &= not problem and bool(rows) and all(row.ok is not False for row in rows)
        text = f"## {part.what}\n"
        if problem:
            text += f"\n**Did not run to its end: {problem}.**\n"
        self._texts.append(text + markdown(rows))
        self._write()

    def _write(self) -> None:
        self._file.write_text("\n\n".join(self._texts) + "\n", encoding="utf-8")


def facts(python: Path) -> str:
    found = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, check=False)
    if found.returncode:
        return f"**torch does not run here: {found.stderr.strip().splitlines()[-1]}**"
    known = json.loads(found.stdout)
    with_driver = shutil.which("nvidia-smi")
    if with_driver:
        query = [with_driver, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(subprocess.TimeoutExpired):
            answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
            known["driver"] = answer.stdout.strip()
    return "\n".join(f"- {name}: {value}" for name, value in known.items())


if __name__ == "__main__":
    sys.exit(main())
