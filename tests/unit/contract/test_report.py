"""What a serve reports of itself, and its way to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.contract.failures import FAILURES
from llmserve.contract.report import (
    CertificateReport,
    FaultReport,
    FrontendReport,
    ModelReport,
    OnDemandReport,
    ReplicaReport,
    ServerReport,
    State,
    best_of,
)

_words = st.text(max_size=4)
_models = st.builds(
    ModelReport, _words, st.sampled_from(State), _words, st.integers(0, 9), _words,
    loads=st.none() | st.integers(0, 9), failing=_words, note=_words, fingerprint=_words,
    certificate=st.none() | st.builds(
        CertificateReport, st.integers(0), st.integers(0), st.integers(0),
        st.none() | st.builds(
            FaultReport, _words, _words, _words, st.none() | st.floats(0, 9), st.floats(0, 9)
        ),
        st.integers(0, 2), _words,
    ),
    demand=st.none() | st.builds(
        OnDemandReport, st.booleans(), st.integers(0), st.booleans(), st.booleans(), _words,
        adapters=st.lists(_words, max_size=2).map(tuple),
        load_seconds=st.none() | st.floats(0, 9), retry_after=st.none() | st.integers(1, 9),
    ),
)  # fmt: skip
_replicas = st.builds(
    ReplicaReport, st.sampled_from(State), models=st.lists(_models, max_size=2).map(tuple)
)


@given(st.lists(_replicas, min_size=1, max_size=2), st.sampled_from(State))
def test_a_report_arrives_as_it_was_sent(replicas: list[ReplicaReport], state: State) -> None:
    frontends = (FrontendReport("openai", state, url="http://127.0.0.1:8080/v1"),)
    report = ServerReport.of(replicas, pid=7, repository="/repo", frontends=frontends)
    assert ServerReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_the_keys_are_those_that_scripts_read() -> None:
    demand = OnDemandReport(loaded=True, size=7, task="generate", adapters=("sql",))
    model = ModelReport("m", State.READY, loads=2, demand=demand)
    content = ServerReport(State.READY, "127.0.0.1:8001", models=(model,)).to_json()
    assert {"pid", "repository", "url", "http", "runtime", "log", "state", "restarts", "models",
            "frontends", "stopping"} <= content.keys()  # fmt: skip
    assert content["models"] == [{
        "name": "m", "state": "ready", "why": "", "restarts": 0, "code": "", "loads": 2,
        "failing": "", "note": "", "fingerprint": "", "reading": False, "loaded": True, "size": 7,
        "pinned": False, "waited_for": False, "task": "generate", "adapters": ["sql"],
    }]  # fmt: skip


def test_another_versions_report_is_read_as_far_as_it_is_known() -> None:
    older = {"state": "ready", "models": [{"name": "m", "state": "ready"}]}
    assert ServerReport.from_json(older).models == (ModelReport("m", State.READY),)
    newer = {**older, "colour": "green", "models": [{**older["models"][0], "mood": 1}]}  # type: ignore[dict-item]
    assert ServerReport.from_json(newer) == ServerReport.from_json(older)


@pytest.mark.parametrize(
    "content", [{}, {"state": "purple"}, {"state": "ready", "models": [7]}, {"models": None}, []]
)
def test_what_is_no_report_is_refused(content: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"report|State"):
        ServerReport.from_json(content)


def test_of_several_replicas_the_best_counts() -> None:
    fails = ModelReport("m", State.READY, failing="it raised", restarts=1)
    answers = ModelReport("m", State.READY, restarts=2)
    loads = ModelReport("m", State.LOADING)
    assert best_of([fails, answers]) == ModelReport("m", State.READY, restarts=3)
    assert best_of([loads, fails]) == fails
    report = ServerReport.of(
        [ReplicaReport(State.RESTARTING, "a", restarts=1), ReplicaReport(State.READY, "b")]
    )
    assert (report.state, report.url, report.restarts) == (State.READY, "a", 1)
    assert len(report.replicas) == 2


def test_answers_are_wrong_if_those_of_all_replicas_are() -> None:
    fault = FaultReport("answer", "token 3 is another", "Once upon a time", 4.5, 0.5)
    well = ModelReport("m", State.READY, certificate=CertificateReport(5, checks=7))
    wrong = ModelReport("m", State.READY, certificate=CertificateReport(5, 2, 1, fault, 1))
    one = best_of([wrong, well])
    assert one.certificate == CertificateReport(5, checks=9, faults=1, faulty=1)
    assert one.fault is None
    assert best_of([wrong, wrong]).fault == fault
    assert wrong.why_not == "", "it still answers"


def test_a_model_that_has_died_names_the_failure_of_who_asks_it() -> None:
    died = ModelReport("m", State.RESTARTING, "its process has died", code="model_died")
    assert died.failure is FAILURES["model_died"]
    assert died.why_not == "restarting: its process has died"
    assert ModelReport("m", State.READY, code="model_died").failure is None
    assert ModelReport("m", State.READY, failing="it raised").why_not == "it raised"
    assert ModelReport("m", State.UNLOADED).why_not == ""
