"""A large weight is read and written a piece at a time: no second copy of it is in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

_MOST = 60_000_000
"""Bytes: the weight of the program has 268 MB in float32, and 67 MB in 8 bits."""

PROGRAM = """
import json, re, sys
from pathlib import Path
from threading import Event, Thread
import numpy as np
import torch
from llmserve.graphs import WeightFormat, openvino as ov, write
from llmserve.graphs.stored import StoredLayer
from llmserve.runtime.torch.freed_memory import returned

# As of a large vocabulary.
folder, shape, ops = Path(sys.argv[1]), (131_072, 512), ov.opset13
CASES = {
    "bfloat16": ["int8", "fp16", "fp32"],
    "float32": ["bf16", "auto"],
}

def make(kind):
    '''Return a weight in a file.'''
    numbers = np.int16 if kind == "bfloat16" else np.float32
    stored = np.memmap(folder / kind, numbers, "w+", shape=shape)
    part = torch.from_numpy(np.random.default_rng(0).standard_normal((4096, 512), np.float32))
    for first in range(0, shape[0], 4096):
        stored[first:][:4096] = part.bfloat16().view(torch.int16) if kind == "bfloat16" else part
    return stored

def own():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def peak_of(action):
    '''Return how much more memory that no file backs there is meanwhile.'''
    before, ended, found = own(), Event(), [0]
    def watch():
        while not ended.wait(0.001):
            found.append(own())
    watcher = Thread(target=watch)
    watcher.start()
    action()
    ended.set()
    watcher.join()
    return max(found) - before

# What torch takes for its first product is no part of it.
torch.ones(64, 64) @ torch.ones(64, 64)
peaks = {}
for kind, formats in CASES.items():
    stored = make(kind)
    flat = stored.reshape(-1).view(np.uint8)
    for name in formats:
        ids = ops.parameter([-1, shape[1]], ov.Type.f32)
        bits = ov.Type.bf16 if kind == "bfloat16" else ov.Type.f32
        constant = ov.op.Constant(ov.Tensor(flat, ov.Shape(shape), bits), True)
        value = constant if kind == "float32" else ops.convert(constant, "f32")
        model = ov.Model([ops.matmul(ids, value, False, True)], [ids])
        path = folder / name / "model.xml"
        peaks[f"{kind} to {name}"] = peak_of(lambda: write(model, path, WeightFormat(name)))
    if kind == "bfloat16":
        module = torch.nn.Linear(1, 1, bias=False)
        weight = torch.from_numpy(stored).view(torch.bfloat16)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer, texts = StoredLayer(module), torch.ones(8, shape[1])
        with returned():
            peaks["computed"] = peak_of(lambda: layer.compute(texts))
print(json.dumps(peaks))
"""


def test_a_large_weight_has_no_second_copy_in_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peaks = json.loads(ended.stdout)
    assert len(peaks) == 6
    assert {name: peak for name, peak in peaks.items() if peak > _MOST} == {}
