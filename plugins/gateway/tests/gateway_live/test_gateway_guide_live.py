"""The program of the guide on answers from one's own texts, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from llmserve.testing import LiveTriton
from tests.support import ROOT
from tests.tiny_encoders import save_classifier, save_encoder

from .process import Gateway

PAGE = ROOT / "docs" / "guides" / "retrieval.md"
TEXTS = ("The cats sleep on the sofa.", "Bread is made of flour.", "It rains.", "Dogs bark.")


def test_a_question_is_answered_from_a_folder_of_texts(
    gateway: Gateway, triton: LiveTriton, tmp_path: Path
) -> None:
    block = re.search(r'```python title="ask.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert block is not None
    embedder = save_encoder(tmp_path / "embedder", pooling="mean_tokens")
    ranker = save_classifier(tmp_path / "ranker", num_labels=1)
    names = {
        "minilm": triton.build("embed", str(embedder), generator="encoder"),
        "ranker": triton.build("rerank", str(ranker), generator="classifier"),
        "writer": triton.build("hf", "demo"),
    }
    program = block[1].replace("http://localhost:8080/v1", gateway.url)
    for name, built in names.items():
        assert f'"{name}"' in program
        program = program.replace(f'"{name}"', f'"{built}"')
    (tmp_path / "ask.py").write_text(program, encoding="utf-8")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "ask.py", "texts", "Where do the cats sleep?"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    served = {line["model"] for line in gateway.log if line.get("status") == 200}
    assert served >= {*names.values()}
