"""What the models read."""

from __future__ import annotations

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""In the order in which a model is traced; some have no segments."""
