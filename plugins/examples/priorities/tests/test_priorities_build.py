"""What the options become in the configuration, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.plugin import IncompatibleError, OptionError
from llmserve.testing import check_repository, read_config
from llmserve_priorities.queues import Queue, parse_queues

REJECT, DELAY = 0, 1


def build(folder: Path, **options: Any) -> Any:
    built = llmserve.build("hf", "demo", batching="priorities", output=folder, **options)
    assert not check_repository(folder)
    return read_config(built.folder).dynamic_batching


def test_every_priority_has_its_queue(tmp_path: Path) -> None:
    found = build(
        tmp_path,
        priority_levels=4,
        default_priority=3,
        queue_size=16,
        queue_timeout_ms=2000,
        queues="1:timeout_ms=0; 4:size=2,action=delay",
    )
    assert (found.priority_levels, found.default_priority_level) == (4, 3)
    usual, others = found.default_queue_policy, found.priority_queue_policy
    assert (usual.max_queue_size, usual.default_timeout_microseconds) == (16, 2_000_000)
    assert usual.timeout_action == REJECT
    assert sorted(others) == [1, 4]
    assert others[1].max_queue_size == 16
    years = others[1].default_timeout_microseconds / 1e6 / 3600 / 24 / 365
    assert years == 100
    assert all(policy.allow_timeout_override for policy in (usual, *others.values()))
    assert (others[4].max_queue_size, others[4].timeout_action) == (2, DELAY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_priority": 4}, "default_priority 4 is over priority_levels 3: lower it"),
        ({"queues": "first:size=1"}, "cannot be read at 'first:size=1': write it as in 1:size=4"),
        ({"queues": "4:size=1"}, "names priority 4, and there are 1 to 3"),
        ({"queues": "1:size=1;1:size=2"}, "names priority 1 twice"),
        ({"queues": "1:size"}, "cannot be read at 'size'"),
        ({"queues": "1:size=-1"}, "cannot be read at 'size=-1'"),
        ({"queues": "1:action=drop"}, "cannot be read at 'action=drop'"),
        ({"queues": "1:patience=1"}, "cannot be read at 'patience=1'"),
        ({"queues": f"1:size={2**31}"}, "cannot be read at"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        build(tmp_path, **options)
    assert message in str(caught.value)


def test_defaults_change_nothing() -> None:
    assert parse_queues(" ; ", levels=3, usual=Queue()) == {}


def test_a_generator_that_wants_to_be_stepped_can_be_queued_too(tmp_path: Path) -> None:
    """One that can run whole batches fits, whatever else it can do; one that cannot does not."""
    built = llmserve.build("iterative", "demo", batching="priorities", output=tmp_path)
    assert built.manifest.components["batching"]["name"] == "priorities"
    with pytest.raises(IncompatibleError, match=r"choose one of .*priorities"):
        llmserve.build("hf", "demo", batching="iterative", output=tmp_path)
