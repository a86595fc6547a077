"""Results as JSON, which is read back, and as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from llmserve.errors import ConfigError
from llmserve_bench.figures import summary
from llmserve_bench.results import Record, Result

SCHEMA = 2
COLUMNS = (
    "index", "scheduled", "sent", "first", "done", "latency", "ttft", "time_between_tokens",
    "input_tokens", "output_tokens", "pieces", "finish_reason", "error", "message", "stand_in",
)  # fmt: skip


def to_json(result: Result) -> str:
    content = {"schema": SCHEMA, **asdict(result), "summary": summary(result)}
    return json.dumps(content, ensure_ascii=False)


def save(result: Result, path: Path) -> None:
    """Write a result to a file, all of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(to_json(result) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def load(path: Path) -> Result:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content["schema"]
        if schema == SCHEMA:
            return TypeAdapter(Result).validate_python(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is not a result of llmserve's measurements") from None
    raise ConfigError(
        f"{path} has schema {schema}, this llmserve-bench reads {SCHEMA}",
        mend="measure again, or use the llmserve that wrote it",
    )


def to_csv(result: Result) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in result.cases:
        for record in (record for run in case.runs for record in run.records):
            times = ["" if value is None else f"{value:.6f}" for value in _times(record)]
            counts = record.input_tokens, record.output_tokens, len(record.pieces)
            end = record.finish_reason, record.error, record.message, ", ".join(case.stand_ins)
            writer.writerow([record.index, *times, *counts, *end])
    return text.getvalue()


def _times(record: Record) -> list[float | None]:
    first = record.pieces[0] if record.pieces else None
    times = [record.scheduled, record.sent, first, record.done]
    if record.error is not None:
        return [*times, None, None, None]
    streamed = len(record.pieces) > 1
    return [*times, record.latency, record.first_token if streamed else None, record.token_time]
