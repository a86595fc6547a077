"""Converts a transformers model to OpenVINO's form: from padded ids to states or to logits.

It runs as a program of its own, whose memory is freed when it ends, and because it prints a lot
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

from llmserve.graphs import TOKENS, StoredWeights, WeightFormat, load, parts, write
from llmserve.graphs import openvino as ov
from llmserve.plugin import ending_for_shortage, tell_done, telling
from llmserve_embed.compiled import MODEL, compiled
from llmserve_embed.inputs import INPUTS
from llmserve_embed.network import reads_segments

_TOLERANCE = 1e-3
_READ, _COMPARED = 0.1, 0.6
"""The shares of the time after which a model is read, and traced and compared."""
_FIRST = 11
"""Ids below this exist in every vocabulary, also where only its first tokens are compared."""
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


def convert(model: Traced, stored: StoredWeights, padding: int) -> Any:
    """Return the model in OpenVINO's form; its output is the first.

    Its weights are those of the model, which has to be kept for as long.
    """
    # With padding, so that no mask is left out because it masks nothing.
    example = tuple(map(torch.from_numpy, _rows([5, 3], padding)[: len(model.names)]))
    with torch.inference_mode():
        converted = stored.traced(model, example)
    for port, name in zip(converted.inputs, model.names, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    return converted


def check(model: Traced, stored: StoredWeights, converted: Any, padding: int) -> float:
    """Return by how much the converted model differs from the model, as a share of its largest."""
    request = compiled(converted, {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    worst = 0.0
    # Other shapes than the traced one, and a text alone.
    for lengths in ([7, 2, 4], [9], [1, 8]):
        rows = dict(zip(model.names, _rows(lengths, padding), strict=False))
        with torch.inference_mode(), stored.computing():
            expected = model(*map(torch.from_numpy, rows.values())).numpy()
        request.infer(rows)
        found = request.get_output_tensor(0).data
        if found.shape != expected.shape:
            return float("inf")
        counted = rows["attention_mask"] == 1 if expected.ndim == 3 else ...
        difference = np.abs(found - expected)[counted].max()
        if not np.isfinite(difference):
            return float("inf")
        worst = max(worst, float(difference / max(np.abs(expected[counted]).max(), 1e-6)))
    return worst


def _rows(lengths: list[int], padding: int) -> tuple[Any, Any, Any]:
    """Return ids, mask and segments of rows of such lengths."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.arange(mask.size).reshape(mask.shape) % _FIRST
    ids += ids >= padding
    return np.where(mask, ids, padding), mask, np.zeros_like(mask)


def main(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """Write the converted model, which is compared with the original before."""
    loader, padding = settings["loader"], int(settings["padding"])
    model = load(
        source,
        loader=loader,
        attention="sdpa",
        pickle=settings["pickle"],
        trust_remote_code=settings["trust_remote_code"],
    )
    stored = StoredWeights(model)
    traced = Traced(model, _OUTPUTS.get(loader, "logits"))
    tell_done(_READ)
    tell, differences = telling(_READ, _COMPARED), []
    for share in parts(model, stored):
        # A part has the first tokens alone.
        within = padding if padding < TOKENS else 0
        _pad_with(model, within)
        part = convert(traced, stored, within)
        differences.append(check(traced, stored, part, within))
        tell(share)
    _pad_with(model, padding)
    converted = convert(traced, stored, padding)
    if not differences:
        differences.append(check(traced, stored, converted, padding))
    if not max(differences) < _TOLERANCE:
        raise SystemExit(f"OpenVINO's values differ from the model's own by {max(differences):.2g}")
    tell_done(_COMPARED)
    chosen = WeightFormat(settings["weight_format"])
    with ending_for_shortage(writes=True):
        write(converted, target / MODEL, chosen, tell=telling(_COMPARED, 1))


def _pad_with(model: Any, padding: int) -> None:
    # A decoder with a head finds a row's last token by it.
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = padding


if __name__ == "__main__":
    with ending_for_shortage():
        main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
