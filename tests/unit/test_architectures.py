"""The page of what is computed of each kind of model says what is so."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from plugins.tools.architectures import PAGE, cell, kinds, listed, variants

SAMPLE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "phi3", "olmo3", "falcon", "gpt2", "gptj", "bloom", "opt", "cohere2", "minicpm3", "mamba",
    "deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama4_text", "qwen3_next",
    "lfm2", "falcon_h1", "longcat_flash", "deepseek_v32", "granitemoehybrid", "phi3+longrope",
    "llama+yarn", "gemma2+uncapped", "qwen2+window", "falcon+alibi",
)  # fmt: skip


def test_the_page_has_every_kind_that_transformers_has() -> None:
    """After another transformers, ``make architectures`` writes it anew."""
    page = PAGE.read_text(encoding="utf-8")
    left_out = re.search(r"(?m)^Not tried, .*: (.*)\.$", page)
    others = left_out[1].split(", ") if left_out else []
    assert sorted([*listed(), *others]) == sorted([*kinds(), *variants()])


@pytest.mark.long
def test_what_the_page_says_is_so() -> None:
    command = [sys.executable, "-m", "plugins.tools.architectures", *SAMPLE]
    ended = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
    lines = [line.split("\t") for line in ended.stdout.splitlines() if "\t" in line]
    rows = {kind: json.loads(row) for kind, row in lines}
    found = {kind: {name: cell(words) for name, words in row.items()} for kind, row in rows.items()}
    told = listed()
    assert found == {kind: told[kind] for kind in SAMPLE}
