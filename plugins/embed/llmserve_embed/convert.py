"""Converts a transformers model to OpenVINO's form: from padded ids to states or to logits.

It runs as a program of its own, because it takes several times the model's memory, and prints a lot
that is of no use as long as it succeeds.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from llmserve.plugin import NOT_WRITTEN, PROGRAM_DONE
from llmserve_embed.compiled import MODEL, compiled
from llmserve_embed.inputs import INPUTS
from llmserve_embed.library import openvino as ov
from llmserve_embed.network import reads_segments

_TOLERANCE = 1e-3
_READ, _TRACED, _COMPARED = 0.2, 0.5, 0.7
"""The shares of the time after which a model is read, traced and compared."""
_OUTPUTS = {"AutoModel": "last_hidden_state"}


class Traced(torch.nn.Module):
    """A model as a function of its inputs alone, which returns one tensor."""

    def __init__(self, model: Any, output: str) -> None:
        super().__init__()
        known = inspect.signature(model.forward).parameters
        self.names = [*INPUTS] if reads_segments(model) else [*INPUTS[:2]]
        self._options = {"use_cache": False} if "use_cache" in known else {}
        self._model = model
        self._output = output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.names, inputs, strict=True))
        output: torch.Tensor = self._model(**named, **self._options)[self._output]
        return output


def convert(model: Traced, padding: int) -> Any:
    """Return the model in OpenVINO's form; its output is the first."""
    # With padding, so that no mask is left out because it masks nothing.
    example = tuple(map(torch.from_numpy, _rows([5, 3], padding)[: len(model.names)]))
    with torch.no_grad():
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            model, example, check_trace=False
        )
    converted = ov.convert_model(traced, example_input=example)
    for port, name in zip(converted.inputs, model.names, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    return converted


def check(model: Traced, converted: Any, padding: int) -> float:
    """Return by how much the converted model differs from the model, as a share of its largest."""
    request = compiled(converted, {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    worst = 0.0
    # Other shapes than the traced one, and a text alone.
    for lengths in ([7, 2, 4], [9], [1, 8]):
        rows = dict(zip(model.names, _rows(lengths, padding), strict=False))
        with torch.inference_mode():
            expected = model(*map(torch.from_numpy, rows.values())).numpy()
        request.infer(rows)
        found = request.get_output_tensor(0).data
        if found.shape != expected.shape:
            return float("inf")
        counted = rows["attention_mask"] == 1 if expected.ndim == 3 else ...
        difference = np.abs(found - expected)[counted].max()
        worst = max(worst, float(difference / max(np.abs(expected[counted]).max(), 1e-6)))
    return worst


def _rows(lengths: list[int], padding: int) -> tuple[Any, Any, Any]:
    """Return ids, mask and segments of rows of such lengths."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    # Low ids exist in every vocabulary.
    ids = np.arange(mask.size).reshape(mask.shape) % 11
    ids += ids >= padding
    return np.where(mask, ids, padding), mask, np.zeros_like(mask)


def main(source: str, target: Path, settings: dict[str, Any]) -> None:
    """Write the converted model."""
    loader = settings["loader"]
    model = (
        getattr(transformers, loader)
        .from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=None if settings["pickle"] else True,
            trust_remote_code=settings["trust_remote_code"],
            local_files_only=True,
        )
        .eval()
    )
    _tell(_READ)
    padding = settings["padding"]
    # A decoder with a head finds a row's last token by it.
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = padding
    traced = Traced(model, _OUTPUTS.get(loader, "logits"))
    converted = convert(traced, padding)
    _tell(_TRACED)
    difference = check(traced, converted, padding)
    if not difference < _TOLERANCE:
        raise SystemExit(f"OpenVINO's values differ from the model's own by {difference:.2g}")
    _tell(_COMPARED)
    if settings["weight_format"] == "int8":
        import nncf

        converted = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_ASYM)
    try:
        target.mkdir(parents=True, exist_ok=True)
        ov.save_model(converted, str(target / MODEL), compress_to_fp16=False)
    except (OSError, RuntimeError) as error:
        # What it raises on a full disk does not say so.
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_WRITTEN)


def _tell(share: float) -> None:
    """Tell the build how much is done. Libraries print here as well."""
    sys.stdout.write(f"\n{PROGRAM_DONE}{share:.2f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
