"""What eight adapters of a real model take in memory is what its plugin says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import llmserve
from llmserve.plugin import add_adapter
from llmserve.plugins.registry import Registry
from llmserve.repository.needs import needs_of
from llmserve.repository.repository import Repository
from llmserve.testing.tiny_adapters import save_adapter
from tests.kept import linked
from tests.real.model import openvino_model
from tests.real.reference import Reference
from tests.support import ROOT

pytestmark = [pytest.mark.real, pytest.mark.long]

_COUNT, _RANK = 8, 16
_NAME = "real-auto"
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# In a process of its own: prints what sequences without adapters take, and those with them more.
_MEASURED = """
import json, re, sys
from importlib import import_module
from pathlib import Path
from llmserve.testing.fake import ByteTokenizer, generation

def decode(ids):
    return "".join(chr(0x10000 + token) for token in ids)

def private():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])

runtime, settings, folder, names = json.loads(sys.argv[1])
module, _, name = runtime.partition(":")
generator = getattr(import_module(module), name)(settings, Path(folder))
engine = generator.stepper(ByteTokenizer())

def run(names):
    for number, name in enumerate(names):
        engine.admit(generation([500 + number] * 8, 2, decode=decode, adapter=name))
    while engine.busy:
        assert not engine.step().failed
    return private()

before = run([None] * len(names))
print(run(names) - before)
"""


@pytest.mark.parametrize("plugin", ["iterative", "openvino"])
def test_adapters_take_what_is_said(reference: Reference, tmp_path: Path, plugin: str) -> None:
    repository = tmp_path / "repository"
    if plugin == "openvino":
        # Converting takes a minute; another test has the same model.
        built = openvino_model(_NAME, weight_format="auto", dtype="float32")
        linked(built, repository / _NAME)
    else:
        llmserve.build(
            plugin, str(reference.folder), name=_NAME, output=repository,
            dtype="float32", cache_tokens=1024,
        )  # fmt: skip
    model = Repository.open(repository).model(_NAME)
    one = save_adapter(tmp_path / "one", reference.model, targets=_TARGETS, rank=_RANK)
    names = [f"a{number}" for number in range(_COUNT)]
    for name in names:
        add_adapter(model, name, one)
    needs = needs_of(model, Registry.load())
    assert needs is not None
    assert model.manifest is not None
    generator = model.manifest.components["generator"]
    told = [generator["runtime"], generator["settings"], str(model.folder / "1"), names]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, json.dumps(told)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    taken = int(done.stdout.splitlines()[-1])
    assert 0.85 * needs.adapters < taken < 1.15 * needs.adapters
