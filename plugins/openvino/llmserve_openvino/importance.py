"""How much each input of a product counts, found by having the model compute some tokens.

A few inputs of a product are many times as large as the others, whatever a text is about: so
tokens by chance do nearly as well as a text. An error of their weights changes an answer most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmserve.graphs import Importance, StoredWeights

_TOKENS = 256


def importance(
    model: Any, stored: StoredWeights, tell: Callable[[float], None] = lambda _: None
) -> Importance:
    """Return what the weights of a model's products are to be rounded by."""
    found: dict[int, torch.Tensor] = {}
    products = [layer for layer in stored.layers.values() if not layer.is_table]

    def add(layer: Any, values: torch.Tensor) -> None:
        squares = values.float().reshape(-1, values.shape[-1]).square().mean(dim=0)
        address = layer.weight.data_ptr()
        # One weight may be that of several products.
        found[address] = found[address] + squares if address in found else squares
        tell(len(found) / len(products))

    hooks = [
        layer.module.register_forward_pre_hook(lambda _, given, layer=layer: add(layer, given[0]))
        for layer in products
    ]
    config = model.config.get_text_config()
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, length), generator=chance)
    try:
        with torch.inference_mode(), stored.computing():
            # Without the scores of each token, which are not needed and large.
            model.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
