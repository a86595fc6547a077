"""The report of ``llmserve bench``: one load against one subject."""

from __future__ import annotations

from llmserve.measure.runs import Run
from llmserve.measure.summary import first_token, latency, summarize, token_time
from llmserve.report import tables, words
from llmserve.report.doubts import doubts, few
from llmserve.report.facts import conditions, model_of, settings
from llmserve.report.page import Draft, Page
from llmserve.report.plots.batches import batches
from llmserve.report.plots.percentiles import Times, percentiles
from llmserve.report.plots.server import server_time
from llmserve.report.plots.timeline import Panel, timeline
from llmserve.report.within import every_share, sizes


def run_page(run: Run) -> Page:
    """Put the report of a run together."""
    name = words.clean(run.subject.name)
    summary = summarize(run)
    named = [(run.subject.name, run)]
    good = [record for record in run.records if record.error is None]
    draft = Draft()
    draft.add(
        "Requests over time",
        figures=[timeline([Panel(run.subject.name, run)])],
    )
    lines = [Times("whole answer", tuple(latency(record) for record in good), 0)]
    if summary.ttft:
        lines.append(Times("first token", tuple(first_token(record) for record in good), 1))
    between = tuple(time for record in good if (time := token_time(record)) is not None)
    draft.add(
        "Latency",
        "Times count from when a request should have been sent.",
        [
            percentiles("latency", "how long answers took", lines, few([run])),
            percentiles(
                "token-time", "time between the tokens of an answer", [Times("", between, 2)]
            )
            if summary.token_time
            else None,
        ],
        [tables.figures(named)],
    )
    draft.add(
        "In the server",
        figures=[server_time(every_share(run)), batches(sizes([(name, run, 0)]))],
        tables=[tables.server(named), tables.published(named)],
    )
    draft.add("Other tools", tables=[tables.tools(run), tables.commands(run)] if run.tools else [])
    draft.add("Failures and cost", tables=[tables.failures(named), tables.loader(named)])
    facts = [
        ("Model", model_of(run.subject)),
        ("Built with", settings(run.subject.build) or "not told: it was served already"),
        *conditions([run], [run.load]),
        ("Measured", words.when(run.started)),
    ]
    return Page(
        f"{name}, {run.load.label}", "bench", tuple(_findings(run)), tuple(doubts(named)),
        tuple(facts), tuple(draft.sections),
    )  # fmt: skip


def _findings(run: Run) -> list[str]:
    summary = summarize(run)
    name = words.clean(run.subject.name)
    done = f"{summary.completed:,} of {words.counted(summary.requests, 'request')}"
    rate = f"{words.number(summary.requests_per_second)} requests"
    if summary.output_tokens_per_second is not None:
        rate += f" and {words.number(summary.output_tokens_per_second)} output tokens"
    found = [f"{name} completed {done} in {words.seconds(run.seconds)}: {rate} per second."]
    if summary.latency:
        found.append(
            f"Half of the answers were complete within {words.seconds(summary.latency.p50)}, "
            f"99 % within {words.seconds(summary.latency.p99)}."
        )
    if summary.ttft:
        line = (
            f"The first token came within {words.seconds(summary.ttft.p50)} for half of them, "
            f"within {words.seconds(summary.ttft.p99)} for 99 %"
        )
        after = summary.token_time
        found.append(f"{line}; then one every {words.seconds(after.p50)}." if after else f"{line}.")
    if summary.within_limits is not None:
        found.append(
            f"{words.share(summary.within_limits)} of the requests held the limits: a goodput of "
            f"{words.number(summary.goodput)} requests per second."
        )
    return found + _server(run)


def _server(run: Run) -> list[str]:
    # An ensemble waits in no queue and makes no batches: its parts do, each in its own way.
    if not run.server or len(run.server.models) != 1 or not run.server.models[0].success:
        return []
    model = run.server.models[0]
    waiting = words.share(model.queue / model.success)
    line = f"Of their time in the server, requests spent {waiting} in its queue"
    if model.executions:
        rows = words.number(model.inferences / model.executions)
        line += f"; it ran {rows} rows per execution on average"
    return [f"{line}."]
