"""Headers of GGUF files: what is read of them, and that no content of them does harm."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.builder.gguf.admission import check_complete, check_extent, dtype_for
from llmserve.builder.gguf.header import GgufHeader, read_header
from llmserve.builder.source import is_gguf, resolve
from llmserve.errors import ModelSourceError

F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write(path: Path, kind: gguf.GGMLQuantizationType = F32, layers: int = 2, **facts: Any) -> Path:
    """Write a file with a matrix of each layer, and a norm; ``facts`` have __ for each dot."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_token_list([b"a", b"b"])
    for name, value in facts.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)
    for layer in range(2):
        data = gguf.quantize(np.ones((2, 64), np.float32), kind)
        writer.add_tensor(f"blk.{layer}.attn_q.weight", data, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def admit(path: Path) -> GgufHeader:
    header = read_header(path)
    check_complete(header)
    check_extent(header)
    return header


@pytest.fixture(scope="session")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "valid.gguf").read_bytes()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(F32, "float32"), (F16, "float16"), (Q8_0, "bfloat16")],
)
def test_weights_keep_their_type_unless_it_is_quantized(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, dtype: str
) -> None:
    header = admit(write(tmp_path / "m.gguf", kind))
    kinds = check_extent(header)
    assert kinds == {kind.name: 256} | {"F32": 64 + 256 * (kind == F32)}
    assert dtype_for(kinds) == dtype
    assert (header.architecture, header.own("block_count")) == ("llama", 2)


def test_each_of_these_files_is_refused_for_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for facts, why in (
        ({"split__count": 3}, "is one of 3 files of a model: join them with"),
        ({"general__type": "adapter"}, "is no model: it says it is of type 'adapter'"),
        ({"layers": 1 << 30}, "claims to have 1073741824 layers, and has 2"),
        ({"general__alignment": 3}, "its alignment cannot be 3"),
    ):
        with pytest.raises(ModelSourceError, match=why):
            admit(write(path, **facts))


def header_of(*parts: bytes, tensors: int = 0, facts: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, facts) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = (1 << 64) - 1
NESTED = text("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "does not begin as a GGUF file does"),
        (b"GGUF", "ends within its header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "does not begin as a GGUF file does"),
        (header_of(version=1), "is in version 1 of GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "another byte order"),
        (header_of(), "names no architecture"),
        (header_of(tensors=HUGE), f"claims to have {HUGE} tensors"),
        (header_of(facts=HUGE), f"claims to have {HUGE} facts"),
        (header_of(struct.pack("<Q", HUGE), facts=1), "ends within its header"),
        (header_of(NESTED, facts=1), "a list of an unknown type, 9"),
        (header_of(text("x"), struct.pack("<IIQ", 9, 8, HUGE), facts=1), "ends within its header"),
        (header_of(text("x"), struct.pack("<IIQ", 9, 4, HUGE), facts=1), "ends within its header"),
        (header_of(text("x"), struct.pack("<I", 77), facts=1), "a fact of an unknown type, 77"),
        (header_of(text("x"), struct.pack("<I", HUGE >> 32), tensors=1), "4294967295 dimensions"),
    ],
)
def test_a_hostile_header_is_refused_in_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match=why) as refused:
        admit(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path, valid: bytes) -> None:
    path = tmp_path / "m.gguf"
    for length in range(0, len(valid) - 1, 7):
        path.write_bytes(valid[:length])
        with pytest.raises(ModelSourceError, match=r"cannot be read: it (ends|has|does not)|bytes"):
            admit(path)


def test_a_long_header_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header_of(text("x"), struct.pack("<IIQ", 9, 0, 1 << 40), facts=1))
    with path.open("ab") as file:
        file.truncate(1 << 41)
    with pytest.raises(ModelSourceError, match="its header has more than 100 MB"):
        admit(path)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, int]]:
    return draw(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1))


@given(changes=damages())
def test_no_change_of_bytes_gets_past_the_checks_in_another_way(
    changes: list[tuple[int, int]], valid: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(valid)
    for position, value in changes:
        content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    with suppress(ModelSourceError):
        header = admit(path)
        assert all(end <= len(content) for end in ends(header))


def ends(header: GgufHeader) -> Iterator[int]:
    """Yield where the data of each tensor ends, as the package gguf reads it."""
    for tensor in header.tensors:
        block, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
        yield header.data + tensor.offset + tensor.elements // block * length


def test_a_file_of_ollamas_store_is_one_by_what_is_in_it(tmp_path: Path, valid: bytes) -> None:
    blob = tmp_path / f"sha256-{'0' * 64}"
    blob.write_bytes(valid)
    assert is_gguf(blob)
    source = resolve(str(blob), report=lambda _: None)
    assert source.path == blob
    assert source.described() == {"kind": "local", "file": blob.name}
    blob.write_bytes(b"{}")
    assert not is_gguf(blob), "a template, or another layer"
    (tmp_path / "model").write_bytes(valid)
    assert not is_gguf(tmp_path / "model")
