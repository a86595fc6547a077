"""How the options appear in the configuration, and which ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.plugin import IncompatibleError, OptionError, check_repository
from llmserve.testing import read_config
from llmserve_priorities.queues import Queue, parse_queues

REJECT, DELAY = 0, 1


def build(folder: Path, **options: Any) -> Any:
    built = llmserve.build("hf", "demo", batching="priorities", output=folder, **options)
    assert not check_repository(folder)
    return read_config(built.folder).dynamic_batching


def test_every_priority_has_its_queue(tmp_path: Path) -> None:
    batching = build(
        tmp_path,
        priority_levels=4,
        default_priority=3,
        queue_size=16,
        queue_timeout_ms=2000,
        queues="1:timeout_ms=0; 4:size=2,action=delay",
    )
    assert (batching.priority_levels, batching.default_priority_level) == (4, 3)
    default, policies = batching.default_queue_policy, batching.priority_queue_policy
    assert (default.max_queue_size, default.default_timeout_microseconds) == (16, 2_000_000)
    assert default.timeout_action == REJECT
    assert sorted(policies) == [1, 4]
    assert policies[1].max_queue_size == 16
    years = policies[1].default_timeout_microseconds / 1e6 / 3600 / 24 / 365
    assert years == 100
    assert all(policy.allow_timeout_override for policy in (default, *policies.values()))
    assert (policies[4].max_queue_size, policies[4].timeout_action) == (2, DELAY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_priority": 4}, "default_priority 4 is over priority_levels 3: lower it"),
        ({"queues": "first:size=1"}, "cannot be parsed at 'first:size=1': write it as in 1:size=4"),
        ({"queues": "4:size=1"}, "has priority 4, which does not exist: use 1 to 3"),
        ({"queues": "1:size=1;1:size=2"}, "has priority 1 twice"),
        ({"queues": "1:size"}, "cannot be parsed at 'size'"),
        ({"queues": "1:size=-1"}, "cannot be parsed at 'size=-1'"),
        ({"queues": "1:action=drop"}, "cannot be parsed at 'action=drop'"),
        ({"queues": "1:patience=1"}, "cannot be parsed at 'patience=1'"),
        ({"queues": f"1:size={2**31}"}, "cannot be parsed at"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        build(tmp_path, **options)
    assert message in str(caught.value)


def test_defaults_change_nothing() -> None:
    assert parse_queues(" ; ", levels=3, default=Queue()) == {}


def test_a_stepping_generator_works_if_it_can_run_whole_batches(tmp_path: Path) -> None:
    built = llmserve.build("iterative", "demo", batching="priorities", output=tmp_path)
    assert built.manifest.components["batching"]["name"] == "priorities"
    with pytest.raises(IncompatibleError, match=r"choose one of .*priorities"):
        llmserve.build("hf", "demo", batching="iterative", output=tmp_path)
