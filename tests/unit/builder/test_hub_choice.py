"""Of all forms in which a model is on the hub, a build downloads the one that it loads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from llmserve.builder.fit import fit_spec
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.builder.size import size_of
from llmserve.builder.source import fetch_file, resolve
from llmserve.errors import ModelSourceError
from llmserve.plugins.registry import Registry
from tests.loopback_hub import MODEL, Hub, point_to

CONFIG = {"dtype": "bfloat16", "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
OTHER_INDEX = json.dumps({"weight_map": {"a": "consolidated-00001-of-00001.safetensors"}}).encode()


def contents(*names: str) -> dict[str, bytes]:
    """Return a content for each file: what two have alike is downloaded once."""
    return {name: name.encode().ljust(1000) for name in names}


BESIDE = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ 1 }}",
}
INDICES = {
    "model.safetensors.index.json": INDEX,
    "consolidated.safetensors.index.json": OTHER_INDEX,
    "model.fp16.safetensors.index.json": OTHER_INDEX + b" ",
}
EVERYTHING = {
    **BESIDE,
    **INDICES,
    **contents(
        *SHARDS,
            ".gitattributes", "README.md", "LICENSE", "picture.png",
            "consolidated-00001-of-00001.safetensors", "consolidated.safetensors",
            "model.fp16.safetensors", "mtp.safetensors", "adapter_model.safetensors",
            "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "training_args.bin",
            "consolidated.00.pth", "optimizer.pt", "tf_model.h5", "flax_model.msgpack",
            "rust_model.ot", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "model.onnx", "model.onnx_data",
            "onnx/config.json", "onnx/model.onnx", "onnx/model_q4.onnx",
            "onnx/model.onnx_data", "onnx/model.onnx_data_1",
            "original/model.safetensors", "original/consolidated.00.pth", "original/params.json",
            "openvino/openvino_model.xml", "openvino/openvino_model.bin",
            "fp16/model.safetensors", "coreml/model.mlpackage",
    ),
}  # fmt: skip
READY = ("openvino_model.xml", "openvino_model.bin")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(dict(EVERYTHING))
    with hub.serving() as url:
        point_to(url, tmp_path / "home", monkeypatch)
        yield hub


def downloaded(hub: Hub, weights: Sequence[str]) -> set[str]:
    """Return what is downloaded beside the small files, which always are."""
    hub.asked.clear()
    folder = resolve(MODEL, weights=weights, report=lambda _: None).path
    small = {name for name in hub.files if "/" not in name and name.endswith((".json", ".jinja"))}
    found = {path.name for path in folder.iterdir()}
    assert small <= found
    assert set(hub.downloaded) == found
    return found - small


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        *((name, SHARDS) for name in ("hf", "iterative", "openvino", "vllm", "gpt2-onnx",
                                      "gpt2-torchscript", "embed", "rerank", "classify", "trtllm")),
    ],
)  # fmt: skip
def test_each_plugin_gets_one_set_of_weights(
    hub: Hub, plugin: str, expected: Collection[str]
) -> None:
    plan = make_plan(BuildSpec(plugin, MODEL), Registry.load())
    assert downloaded(hub, plan.generator.weights) == set(expected)
    assert sum(hub.sent_bytes().values()) == sum(
        len(content) for name, content in EVERYTHING.items()
        if name in expected or ("/" not in name and name.endswith((".json", ".jinja")))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("files", "weights", "expected"),
    [
        (["model.safetensors", "consolidated.safetensors", "pytorch_model.bin"],
         ["*.safetensors"], {"model.safetensors"}),
        (["model.safetensors", "pytorch_model.bin"],
         ["*.safetensors", "*.bin"], {"model.safetensors"}),
        (["pytorch_model.bin", "training_args.bin", "tf_model.h5"],
         ["*.safetensors", "*.bin"], {"pytorch_model.bin"}),
        (["own-a.safetensors", "own-b.safetensors"],
         ["*.safetensors"], {"own-a.safetensors", "own-b.safetensors"}),
        ([*READY, "model.safetensors"], ["*.safetensors", *READY], set(READY)),
        ([READY[0], "model.safetensors"], ["*.safetensors", *READY], {"model.safetensors"}),
        (["model.onnx", "model_q4.onnx", "onnx/model.onnx"], ["*.onnx", "onnx/*.onnx"], set()),
        (["a.npz", "b.npz", "model.safetensors"], ["*.npz"], {"a.npz", "b.npz"}),
    ],
)  # fmt: skip
def test_one_form_is_taken_of_those_that_there_are(
    hub: Hub, files: Sequence[str], weights: Sequence[str], expected: set[str]
) -> None:
    hub.files = {**BESIDE, **contents(*files)}
    assert downloaded(hub, weights) == expected


def test_an_adapter_that_is_loaded_with_the_model_comes_too(hub: Hub) -> None:
    names = ["model.safetensors", "adapter_model.safetensors"]
    hub.files = {**BESIDE, "adapter_config.json": b"{}", **contents(*names)}
    assert downloaded(hub, ["*.safetensors"]) == set(names)


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.safetensors", "onnx/model.safetensors"])
def test_an_index_names_only_what_is_beside_it(hub: Hub, name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    hub.files["model.safetensors.index.json"] = index
    with pytest.raises(ModelSourceError, match="which is no file beside it"):
        resolve(MODEL, report=lambda _: None)


def test_a_shard_that_an_index_names_has_to_be_there(hub: Hub) -> None:
    del hub.files[SHARDS[1]]
    with pytest.raises(
        ModelSourceError, match=rf"has no {SHARDS[1]}, which model\.safetensors\.in"
    ):
        resolve(MODEL, report=lambda _: None)
    assert set(hub.downloaded) == {"model.safetensors.index.json"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["model.safetensors"], "acme/tiny is not a model: it has no config.json"),
        (["config.json", "pytorch_model.bin"], "acme/tiny has only pickled weights, which can run"),
        (["config.json", "onnx/model.onnx"], "acme/tiny has no weights: no *.safetensors in "),
        (["a-Q4_K.gguf", "q/b.gguf"],
         "acme/tiny has its weights in GGUF files: name one: acme/tiny:a-Q4_K.gguf (or q/b.gguf)"),
        (["config.json", "a.gguf"],
         "acme/tiny has its weights in GGUF files: name one: acme/tiny:a.gguf"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_said_before_anything_is_downloaded(
    hub: Hub, files: Sequence[str], message: str
) -> None:
    hub.files = dict.fromkeys(files, b"{}")
    with pytest.raises(ModelSourceError) as caught:
        resolve(MODEL, report=lambda _: None)
    assert str(caught.value).startswith(message)
    assert hub.downloaded == []


def test_a_file_comes_alone_or_with_those_that_hold_its_weights(hub: Hub) -> None:
    model = resolve(f"{MODEL}:tiny-Q8_0.gguf", report=lambda _: None)
    assert (model.path.name, hub.downloaded) == ("tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"])
    hub.asked.clear()
    file = fetch_file(
        MODEL,
        "onnx/model.onnx",
        revision="",
        report=lambda _: None,
        beside=["onnx/model.onnx*data*"],
    )
    names = ["onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx_data_1"]
    assert sorted(hub.downloaded) == names
    assert sorted(path.name for path in file.parent.iterdir()) == [Path(n).name for n in names]
    hub.asked.clear()
    assert fetch_file(MODEL, names[0], revision=hub.commit, report=lambda _: None) == file
    assert hub.asked == [], "a file of a commit is the same for ever"
    with pytest.raises(ModelSourceError, match=r"acme/tiny has no file other\.gguf: see its page"):
        resolve(f"{MODEL}:other.gguf", report=lambda _: None)


def test_whether_it_fits_is_told_of_what_is_downloaded_and_with_little_of_it(hub: Hub) -> None:
    size = size_of(MODEL)
    assert size is not None
    assert (size.bytes, size.parameters, size.is_on_hub) == (2000, 1000, True)
    assert set(hub.downloaded) == {"config.json", "model.safetensors.index.json"}
    resolve(MODEL, report=lambda _: None)
    assert sorted(hub.downloaded) == sorted(set(hub.downloaded)), "nothing is downloaded twice"


def test_whether_it_fits_meets_a_hub_as_the_download_does(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, said = BuildSpec("hf", MODEL, output=tmp_path / "repository"), list[str]()

    def fitted() -> object:
        return fit_spec(spec, Registry.load(), serves=False, change=False, report=said.append)

    hub.private = "hf_right"
    with pytest.raises(ModelSourceError, match=r"no model 'acme/tiny', or it is private"):
        fitted()
    hub.private = ""
    resolve(MODEL, report=lambda _: None)
    point_to("http://127.0.0.1:9", tmp_path / "home", monkeypatch)
    fitted()
    assert [each for each in said if "acme/tiny is taken from the cache" in each]
    point_to("http://127.0.0.1:9", tmp_path / "other", monkeypatch)
    with pytest.raises(ModelSourceError, match="the hub cannot be reached"):
        fitted()
