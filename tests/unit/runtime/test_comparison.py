"""What a runner computes, held against the model's own logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from llmserve.runtime.torch.comparison import off_by

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -40.0]])


def test_rows_are_compared_where_a_token_is_likely() -> None:
    rows = LOGITS.numpy().copy()
    assert off_by(rows, LOGITS) == pytest.approx(0, abs=1e-6)
    rows[1, 2] = -39.0
    assert off_by(rows, LOGITS) == pytest.approx(0, abs=1e-6), "its last digits are large"
    rows[0, 2] += 0.5
    assert off_by(rows, LOGITS) > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_equals_nothing(value: float) -> None:
    """A model that computes none itself is not the same as one that cannot be compared."""
    wrong = LOGITS.clone()
    wrong[1, 0] = value
    assert off_by(wrong.numpy(), LOGITS) == math.inf
    assert off_by(LOGITS.numpy(), wrong) == math.inf
    assert off_by(np.full((2, 3), value, np.float32), torch.full((2, 3), value)) == math.inf
