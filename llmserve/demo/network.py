"""The demo model's network and the files that hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmserve.demo.tokenizer import VOCABULARY

POSITIONS = 512


def new_network() -> Any:
    """Return an untrained GPT-2 of 1.5 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=160,
        n_layer=4,
        n_head=5,
        # Every window is new text, so there is nothing to overfit.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def save_network(network: Any, folder: Path) -> None:
    """Write the weights as float16 and a configuration that loads them as float32.

    Half the bytes travel in the wheel; the arithmetic is float32, so that answers in
    a batch equal the answers alone.
    """
    import torch
    from safetensors.torch import save

    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in network.state_dict().items()
        # Tied to transformer.wte.weight, so it is stored once, under that name.
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    config = network.config.to_diff_dict()
    config["architectures"] = ["GPT2LMHeadModel"]
    config["pad_token_id"] = 0
    config["dtype"] = "float32"
    # Older releases of transformers read this name instead.
    config["torch_dtype"] = "float32"
    version = config["transformers_version"]
    generation = {
        "do_sample": False,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "transformers_version": version,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
