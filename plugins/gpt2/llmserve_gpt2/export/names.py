"""The names of the exported graph's tensors, the same in both formats.

libtorch's backend requires ``name__index`` for every tensor of a model that has state. The numbers
of the layers have leading zeros because Triton pairs a state's input with its output by their
alphabetical order and not by the configuration (triton-inference-server/server#8586).
"""

from __future__ import annotations

INPUT_IDS = "input_ids__0"
POSITION_IDS = "position_ids__1"
ATTENTION_MASK = "attention_mask__2"
PAST_MASK = "past_mask__3"
INPUTS = (INPUT_IDS, POSITION_IDS, ATTENTION_MASK, PAST_MASK)
LOGITS = "logits__0"


def states(layers: int) -> list[tuple[str, str]]:
    """Return every state's input and output name, keys before values, layer by layer.

    >>> states(1)
    [('past_0_key__4', 'present_0_key__1'), ('past_0_value__5', 'present_0_value__2')]
    """
    width = len(str(layers - 1))
    tensors = [f"{layer:0{width}}_{kind}" for layer in range(layers) for kind in ("key", "value")]
    return [
        (f"past_{tensor}__{len(INPUTS) + index}", f"present_{tensor}__{1 + index}")
        for index, tensor in enumerate(tensors)
    ]
