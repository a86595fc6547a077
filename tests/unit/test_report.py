from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llmserve.errors import ConfigError
from llmserve.measure.results import Comparison, Result, Run, Sweep, load, save
from llmserve.report import page, write
from tests.unit.report_examples import make_comparison, make_run, make_sweep, with_tools

EVIL = "</title><script>alert('x')</script> $a_{b$ |`_*[x](http://y) & \x00\ud800\u202e <img src=x>"


class Reader(HTMLParser):
    """Notes the elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


RESULTS: dict[str, Result] = {
    "run": with_tools(make_run("iterative", requests=40, failing=2)),
    "comparison": make_comparison(requests=40),
    "loads": make_comparison((2, 16), requests=30),
    "sweep": make_sweep(),
}


@pytest.fixture(scope="module", params=RESULTS, ids=str)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save(RESULTS[request.param], folder / "result.json")
    files = write(load(folder / "result.json"), folder)
    assert sorted([*files, folder / "result.json"]) == sorted(folder.iterdir())
    return folder


def test_the_page_stands_alone(written: Path) -> None:
    text = (written / "report.html").read_text()
    read = Reader(text)
    assert "script" not in read.tags
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    for name, value in read.attributes:
        if name in ("src", "href", "xlink:href"):
            assert (value or "").startswith(("#", "data:")), (name, value)
    assert len(text) < 600_000


def test_every_plot_speaks_and_has_its_figures_as_text(written: Path) -> None:
    made = page(load(written / "result.json"))
    figures = [figure for section in made.sections for figure in section.figures]
    assert len(figures) >= 4
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        root = ET.fromstring((written / f"{figure.name}.svg").read_text())
        title, description = root[0], root[1]
        assert title.text == figure.title
        assert description.text == figure.alt
        assert len(figure.alt) > 30
        if figure.table:
            assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)


def test_ids_of_plots_do_not_meet_on_the_page(written: Path) -> None:
    read = Reader((written / "report.html").read_text())
    ids = [value for name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {str(value)[1:] for name, value in read.attributes if name == "xlink:href"}
    assert wanted <= set(ids)


def test_markdown_shows_every_plot_and_its_tables_are_even(written: Path) -> None:
    text = (written / "report.md").read_text()
    shown = re.findall(r"\]\(([\w-]+\.svg)\)", text)
    assert sorted(shown) == sorted(path.name for path in written.glob("*.svg"))
    widths = set()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            widths.add(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(widths) <= 1
            widths = set()


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    # Once here, and once in another process with other hashes, in another folder.
    saved, here, there = (tmp_path / name for name in ("run.json", "here", "there"))
    save(make_comparison(requests=20, rounds=1), saved)
    write(load(saved), here)
    code = (
        "import sys; from pathlib import Path; from llmserve.measure.results import load;"
        "from llmserve.report import write; write(load(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(saved), str(there)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, timeout=120)
    assert len(list(there.iterdir())) > 6
    for path in here.iterdir():
        assert path.read_bytes() == (there / path.name).read_bytes(), path.name


def evil(run: Run, name: str = EVIL) -> Run:
    record = replace(run.records[0], error=EVIL, message=EVIL, first=None)
    subject = replace(run.subject, name=name, model=EVIL, url=EVIL, build={EVIL: EVIL}, server=EVIL)
    assert run.server
    figures = replace(run.server.models[0], model=EVIL, batches={EVIL: 3, "2": 1})
    return replace(
        run,
        subject=subject,
        load=replace(run.load, dataset=EVIL, options={EVIL: [EVIL, 1.5, None, True]}),
        started=EVIL,
        records=(record, *run.records[1:]),
        server=replace(run.server, models=(figures,), metrics={EVIL: 1.0}),
        loader=replace(run.loader, warning=EVIL),
        machine={EVIL: EVIL},
    )


def evil_comparison() -> Comparison:
    base = make_comparison(requests=20, rounds=1)
    names = {name: f"{name} {EVIL}" for name in ("static", "inflight")}
    cells = tuple(
        replace(
            cell,
            subject=names[cell.subject],
            runs=tuple(evil(run, names[cell.subject]) for run in cell.runs),
        )
        for cell in base.cells
    )
    ratios = tuple(
        replace(row, subject=names[row.subject], against=names[row.against], why=EVIL, metric=EVIL)
        for row in base.ratios
    )
    subjects = tuple(replace(part, name=names[part.name]) for part in base.subjects)
    return replace(base, title=EVIL, cells=cells, ratios=ratios, subjects=subjects)


def evil_sweep() -> Sweep:
    base = make_sweep()
    variants = tuple(
        replace(
            variant, name=f"{variant.name} {EVIL}", build={**variant.build, EVIL: EVIL}, why=EVIL,
            runs=tuple(map(evil, variant.runs)),
        )
        for variant in base.variants
    )  # fmt: skip
    ranking = tuple(f"{name} {EVIL}" for name in base.ranking)
    varied = {**base.varied, EVIL: (EVIL,)}
    return replace(base, title=EVIL, variants=variants, ranking=ranking, varied=varied, plugin=EVIL)


@pytest.mark.parametrize(
    "result",
    [evil(make_run("static", requests=20)), evil_comparison(), evil_sweep()],
    ids=["run", "comparison", "sweep"],
)
def test_nothing_from_outside_becomes_markup(result: Result, tmp_path: Path) -> None:
    write(result, tmp_path)
    text = (tmp_path / "report.html").read_text()
    read = Reader(text)
    assert not {"script", "img", "a"} & set(read.tags)
    assert "alert('x')" in read.text
    assert "\u202e" not in text
    for path in tmp_path.glob("*.svg"):
        allowed = {"svg", "title", "desc", "style", "rect", "g", "path", "text", "defs", "use",
                   "clipPath"}  # fmt: skip
        assert {node.tag.split("}")[1] for node in ET.parse(path).getroot().iter()} <= allowed
    markdown = (tmp_path / "report.md").read_text()
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", markdown)
    assert not re.search(r"(?<!\\)\]\((?![\w-]+\.svg\))", markdown)


def nothing_done(run: Run) -> Run:
    records = tuple(
        replace(record, first=None, pieces=(), tokens=(), output_tokens=None, error="timeout")
        for record in run.records
    )
    return replace(run, records=records, server=None)


@pytest.mark.parametrize(
    "change",
    [
        nothing_done,
        lambda run: replace(run, records=(), seconds=0.0, server=None),
        lambda run: replace(run, records=run.records[:1]),
        lambda run: replace(run, load=replace(run.load, concurrency=None, rate=2.5)),
    ],
    ids=["all failed", "no requests", "one request", "a rate"],
)
def test_reports_of_little_are_reports_all_the_same(change: object, tmp_path: Path) -> None:
    assert callable(change)
    run = change(make_run("iterative", requests=20))
    cells = [
        replace(cell, load=run.load.label, runs=tuple(change(part) for part in cell.runs))
        for cell in make_comparison((16,), requests=20).cells
    ]
    comparison = replace(
        make_comparison((16,), requests=20), cells=tuple(cells), loads=(run.load.label,), ratios=()
    )
    sweep = make_sweep()
    variants = [
        replace(part, runs=tuple(map(change, part.runs)), latency=None, throughput=None)
        for part in sweep.variants
    ]
    results = (
        run,
        comparison,
        replace(sweep, variants=tuple(variants)),
        replace(sweep, ranking=()),
    )
    for at, result in enumerate(results):
        write(result, tmp_path / str(at))
        assert "nan" not in Reader((tmp_path / str(at) / "report.html").read_text()).text


def test_answers_in_one_piece_have_no_time_to_first_token() -> None:
    run = make_run("static", requests=20, stream=False)
    made = page(replace(run, load=replace(run.load, stream=False)))
    assert dict(made.facts)["Answers"] == "in one piece"
    assert "first token" not in " ".join(made.findings)
    timeline = made.sections[0].figures[0].svg
    assert "whole answer" in timeline
    assert "next piece" not in timeline


def test_many_requests_leave_the_file_small(tmp_path: Path) -> None:
    run = make_run("iterative", requests=300, concurrency=32)
    many = tuple(
        replace(record, index=at, scheduled=record.scheduled + at // 300)
        for at, record in enumerate(run.records * 20)
    )
    write(replace(run, records=many), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000
    assert "Only the first 120 requests are drawn." in (tmp_path / "report.md").read_text()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the report to .*taken"):
        write(make_run("static", requests=5), tmp_path / "taken")
