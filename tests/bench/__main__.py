"""Print the core's benchmarks, a table each: ``python -m tests.bench``."""

from __future__ import annotations

from rich.console import Console

from tests.bench import batching, loader, startup


def main() -> None:
    console = Console()
    for module in (startup, batching, loader):
        console.print(module.table())


if __name__ == "__main__":
    main()
