"""Adapters that requests add and remove: who may, from where, and what is answered."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import llmserve
from llmserve.plugin import demo_model_path
from llmserve.server import ServerReport, State
from llmserve.testing.serving import listening
from llmserve.testing.tiny_adapters import save_adapter
from llmserve_gateway.adapter_changes import AdapterChanges, Addition
from llmserve_gateway.adding_adapter import LARGEST, Refused, copy_adapter
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import Key, new_key

from .gateways import NO_TRITON, app_before
from .test_gateway_adapters import Triton

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Post = Callable[..., Any]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_model_path()))
    return save_adapter(tmp_path_factory.mktemp("adapters") / "one", model, targets=("c_attn",))


@pytest.fixture
def home(tmp_path: Path, adapter: Path) -> Path:
    """The folder for adapters, with one that is right and one that is not of the model."""
    home = tmp_path / "home"
    for name in ("one", "bad"):
        (home / name).mkdir(parents=True)
        for file in adapter.iterdir():
            (home / name / file.name).write_bytes(file.read_bytes())
    facts = json.loads((adapter / CONFIG).read_text())
    (home / "bad" / CONFIG).write_text(json.dumps({**facts, "use_dora": True}))
    return home


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that take adapters."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("demo", "other"):
        llmserve.build("iterative", "demo", name=name, output=folder)
    return folder


@pytest.fixture
def repository(tmp_path: Path, built: Path) -> Path:
    shutil.copytree(built, tmp_path / "models")
    return tmp_path / "models"


@asynccontextmanager
async def gateway(
    tmp_path: Path, *models: str, key: str = "", **settings: Any
) -> AsyncIterator[Post]:
    """Yield what posts to a gateway that a `serve` with these models has started."""

    async def report(_: Mapping[str, Any]) -> ServerReport:
        return ServerReport(State.READY, repository=str(tmp_path / "models"))

    settings = {"local": True, "adapter_folder": tmp_path / "home", **settings}
    socket = tmp_path / "socket"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with listening(socket, report):
        app = app_before(
            Triton({model: [] for model in models}),
            Settings(NO_TRITON, supervisor=socket, **settings),
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:

            async def post(do: str, **fields: Any) -> Any:
                return await client.post(f"/v1/{do}_lora_adapter", json=fields)

            yield post


@pytest.mark.long
def test_adapters_are_added_replaced_and_removed_in_vllms_words(
    tmp_path: Path, home: Path, repository: Path
) -> None:
    folder = repository / "demo" / "1" / "adapters"

    async def go() -> None:
        async with gateway(tmp_path, "demo") as post:
            added = await post("load", lora_name="sql", lora_path="one")
            assert added.text == "Success: LoRA adapter 'sql' added successfully."
            assert added.status_code == 200
            assert [path.name for path in folder.iterdir()] == ["sql"]
            again = await post("load", lora_name="sql", lora_path="one")
            assert again.status_code == 400
            assert "has already been loaded" in again.json()["error"]["message"]
            replaced = await post(
                "load", lora_name="sql", lora_path=str(home / "one"), load_inplace=True
            )
            assert replaced.status_code == 200
            refused = await post("load", lora_name="b", lora_path="bad")
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("lora_path", "adapter_unusable")
            assert error["message"] == "the adapter b has DoRA (use_dora), which are not supported"
            missing = await post("load", lora_name="b", lora_path="owner/name")
            assert missing.status_code == 404
            assert "No adapter found for owner/name" in missing.json()["error"]["message"]
            assert [path.name for path in folder.iterdir()] == ["sql"], "nothing is left over"
            removed = await post("unload", lora_name="sql")
            assert removed.text == "Success: LoRA adapter 'sql' removed successfully."
            gone = await post("unload", lora_name="sql", lora_int_id=1)
            assert gone.status_code == 404
            assert "'sql' cannot be found." in gone.json()["error"]["message"]

    asyncio.run(go())
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_name": "x"}, "lora_path must be a non-empty string"),
        ({"lora_path": "one"}, "lora_name must be a non-empty string"),
        ({"lora_name": "", "lora_path": "one"}, "lora_name must be"),
        ({"lora_name": 5, "lora_path": "one"}, "lora_name must be"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, "lora_path is too long"),
        ({"lora_name": "x", "lora_path": "one", "load_inplace": "yes"}, "must be true or false"),
        ({"lora_name": "x", "lora_path": "one", "is_3d_lora_weight": True}, "of experts"),
        ({"lora_name": "demo", "lora_path": "one"}, "conflicts with a served base model"),
        ({"lora_name": "x", "lora_path": "one"}, "name one of demo:x, other:x"),
        ({"lora_name": "demo:a/b", "lora_path": "one"}, "cannot be called 'a/b'"),
        ({"lora_name": "demo:../x", "lora_path": "one"}, "cannot be called"),
        ({"lora_name": "demo:", "lora_path": "one"}, "cannot be called"),
        ({"lora_name": "demo:a:b", "lora_path": "one"}, "cannot be called"),
    ],
)
def test_what_cannot_be_meant_is_refused_without_a_look_at_files(
    fields: dict[str, Any], words: str, tmp_path: Path, repository: Path
) -> None:
    async def go() -> Any:
        async with gateway(tmp_path, "demo", "other") as post:
            return await post("load", **fields)

    refused = asyncio.run(go())
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert not [*repository.glob("*/1/adapters/*")]


@pytest.mark.long
def test_only_who_may_changes_adapters_and_only_of_its_models(
    tmp_path: Path, home: Path, repository: Path
) -> None:
    keys = tmp_path / "keys"
    plain = new_key(keys, "plain", operator=True)
    one = new_key(keys, "one", models=["demo:sql"], adapters=True)
    order = {"lora_name": "demo:sql", "lora_path": "one"}

    async def asked(do: str, fields: dict[str, str], key: str = "", **settings: Any) -> Any:
        async with gateway(tmp_path, "demo", "other", key=key, **settings) as post:
            return await post(do, **fields)

    async def go() -> None:
        for do in ("load", "unload"):
            refused = await asked(do, order, plain, keys=keys)
            assert refused.status_code == 403
            assert "--adapters" in refused.json()["error"]["message"]
            assert (await asked(do, order, keys=keys)).status_code == 401
            assert (await asked(do, order, local=False)).status_code == 403
            assert (await asked(do, order, adapter_folder=None)).status_code == 404
        for name in ("other:sql", "demo:chat", "chat"):
            refused = await asked("load", {**order, "lora_name": name}, one, keys=keys)
            assert refused.status_code == 404, name
        assert not [*repository.glob("*/1/adapters/*")]
        # To this key, the name alone is clear.
        assert (await asked("load", {**order, "lora_name": "sql"}, one, keys=keys)).is_success
        assert [path.name for path in repository.glob("*/1/adapters/*")] == ["sql"]
        assert (await asked("unload", {"lora_name": "demo:sql"}, one, keys=keys)).is_success

    asyncio.run(go())


def test_no_path_leads_out_of_the_folder(tmp_path: Path, home: Path, adapter: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    outside = tmp_path / "outside"
    adapter.rename(outside)
    try:
        (home / "link").symlink_to(outside)
        (home / "files").mkdir()
        for name in (CONFIG, WEIGHTS):
            (home / "files" / name).symlink_to(outside / name)
        (home / "deep" / "snapshots" / "a").mkdir(parents=True)
        (home / "deep" / "blobs").symlink_to(outside)
        (home / "deep" / "snapshots" / "a" / CONFIG).symlink_to(f"../../blobs/{CONFIG}")
        for path in ("..", "../outside", "one/../../outside", str(outside), "/", "\0", "one\0"):
            with pytest.raises(Refused, match="leads out of the folder"):
                copy_adapter(home, path, to)
        for path in ("link", "files", "deep/snapshots/a"):
            with pytest.raises(Refused, match="is a link out of the folder"):
                copy_adapter(home, path, to)
        assert not [*to.iterdir()]
        # A link that stays within leads nowhere else.
        (home / "within").symlink_to("one")
        assert copy_adapter(home, "within", to)
        assert sorted(path.name for path in to.iterdir()) == [CONFIG, WEIGHTS]
    finally:
        outside.rename(adapter)


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    home, to = tmp_path / "home", tmp_path / "to"
    (home / "pipe").mkdir(parents=True)
    to.mkdir()
    os.mkfifo(home / "pipe" / CONFIG)
    with pytest.raises(Refused, match="is no file"):
        copy_adapter(home, "pipe", to)
    (home / "huge").mkdir()
    with (home / "huge" / CONFIG).open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(Refused, match="is over 1 GB"):
        copy_adapter(home, "huge", to)
    assert not copy_adapter(home, "absent", to)
    assert not [*to.iterdir()]


class _Slow(AdapterChanges):
    """Notes how many changes are carried out at once."""

    def __init__(self) -> None:
        super().__init__(Settings(NO_TRITON))
        self.running = self.most = self.done = 0

    def _add(self, order: Addition, offered: Sequence[str], key: Key | None) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.1)
        self.running -= 1
        self.done += 1
        return order.name


def test_a_client_that_has_gone_lets_no_other_change_begin_early() -> None:
    async def go() -> _Slow:
        slow = _Slow()
        for _ in range(3):
            gone = asyncio.ensure_future(slow.add(Addition("one", "one", False), [], None))
            await asyncio.sleep(0.01)
            gone.cancel()
        assert await slow.add(Addition("last", "last", False), [], None) == "last"
        return slow

    slow = asyncio.run(go())
    assert (slow.most, slow.done) == (1, 4)
