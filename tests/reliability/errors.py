"""Print the errors of a load over time: python -m tests.reliability.errors requests.csv."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path


def main(path: Path) -> None:
    sent: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            second = int(float(row["sent"]))
            sent[second] += 1
            failed[second] += bool(row["error"])
    for second in range(min(sent, default=0), max(sent, default=-1) + 1):
        good = "." * (sent[second] - failed[second])
        print(f"{second:>4} s  {good}{'E' * failed[second]}")
    bad, total = sum(failed.values()), sum(sent.values())
    print(f"errors in {sum(map(bool, failed.values()))} seconds, {bad} of {total} requests")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
