"""Print every benchmark's table: ``python -m tests.bench``."""

from __future__ import annotations

from rich.console import Console

from tests.bench import batching, inflight, startup


def main() -> None:
    console = Console()
    for module in (startup, batching, inflight):
        console.print(module.table())


if __name__ == "__main__":
    main()
