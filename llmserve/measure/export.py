"""Records as CSV, a request a line."""

from __future__ import annotations

import csv
import io

from llmserve.measure.runs import Run
from llmserve.measure.summary import first_token, latency, token_time

COLUMNS = (
    "index", "scheduled", "sent", "first", "done", "latency", "ttft", "time_between_tokens",
    "input_tokens", "output_tokens", "pieces", "finish_reason", "error", "message", "stand_in",
)  # fmt: skip


def to_csv(run: Run) -> str:
    """Write every request with its times in seconds; what does not exist is empty.

    ``stand_in`` names what was not there and was stood in for.
    """
    parts = sorted(set(run.server.stand_ins.values())) if run.server else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in run.records:
        good = record.error is None
        times = (record.scheduled, record.sent, record.first, record.done)
        between = token_time(record)
        came = first_token(record) if len(record.pieces) > 1 else None
        derived = (latency(record), came, between) if good else (None, None, None)
        writer.writerow(
            [
                record.index,
                *("" if value is None else f"{value:.6f}" for value in (*times, *derived)),
                record.input_tokens,
                record.output_tokens,
                len(record.pieces),
                record.finish_reason,
                record.error,
                record.message,
                ", ".join(parts),
            ]
        )
    return text.getvalue()
