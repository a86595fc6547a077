"""Where ``place`` puts files of a model whose weights stay elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmserve.builder.context import BuildContext
from llmserve.demo import demo_model_path
from llmserve.repository import config as modelconfig


@pytest.mark.parametrize(("copy", "copied"), [(None, False), (False, False), (True, True)])
def test_small_files_can_be_copied_where_weights_are_not(
    copy: bool | None, copied: bool, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    context = BuildContext(
        name="tested",
        model=str(model),
        options={
            "revision": "", "pickle": False, "weights": "reference", "trust_remote_code": False
        },
        folder=tmp_path / "1",
        config=modelconfig.new_config("tested", backend="python", max_batch_size=1),
        report=lambda _: None,
    )  # fmt: skip
    settings = context.place([model / "tokenizer.json"], "tokens", copy=copy)
    assert (tmp_path / "1" / "tokens" / "tokenizer.json").is_file() == copied
    assert settings == {"path": "tokens" if copied else str(model)}
