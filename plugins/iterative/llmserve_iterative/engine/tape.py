"""A pass over the model, noted once and played again without the model's own code.

A step of a few tokens of a small model takes about as long in Python as in the processor's
units. But for so many tokens the code always does the same, only with other numbers. So what it
does is noted with its operands, and played over memory that was laid out beforehand: views cost
nothing any more, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from llmserve_iterative.engine.layout import Life, lay_out
from llmserve_iterative.engine.noting import Note, as_pointers

Step = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

_LEAST = 1 << 16
# What Python's own bindings do in half the time of the general way.
_QUICK: Mapping[str, Callable[..., Any]] = {
    "aten::add.out": torch.add,
    "aten::mul.out": torch.mul,
    "aten::sub.out": torch.sub,
    "aten::cat.out": torch.cat,
    "aten::gelu.out": torch._C._nn.gelu,
    "aten::silu.out": torch._C._nn.silu,
}


class Memory:
    """What tapes work in. Only one is played at a time, so they share it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return so many bytes, or more: they double, so that few are left behind."""
        if size > len(self._bytes):
            self._bytes = torch.empty(max(_LEAST, 1 << (size - 1).bit_length()), dtype=torch.uint8)
        return self._bytes


class Tape:
    """The steps of a pass. What is in ``inputs`` changes from pass to pass, and nothing else."""

    def __init__(
        self,
        notes: Sequence[Note],
        inputs: Sequence[torch.Tensor],
        output: torch.Tensor,
        memory: Memory,
    ) -> None:
        needed = _needed(notes, output)
        lives = _lives(notes, needed, output)
        offsets, size = lay_out(list(lives.values()))
        self._at = dict(zip(lives, offsets, strict=True))
        self._memory = memory.take(size)
        self._inputs = {_storage(tensor): torch.empty_like(tensor) for tensor in inputs}
        self.inputs = list(self._inputs.values())
        """What to fill before it is played."""
        self._output: torch.Tensor = self._moved(output)
        # Pointers alone would not keep what they point to.
        self._operands = [operand for note in needed for operand in map(self._moved, note.operands)]
        self._steps = [self._step(note) for note in needed]

    def play(self) -> torch.Tensor:
        """Do it all again, and return where the result is until the next time."""
        for function, args, kwargs in self._steps:
            function(*args, **kwargs)
        return self._output

    def _moved(self, leaf: Any) -> Any:
        """Return where an operand is when the tape is played."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage, offset = _storage(leaf), leaf.storage_offset()
        if (base := self._inputs.get(storage)) is None:
            if (at := self._at.get(storage)) is None:
                return leaf
            base, offset = self._memory.view(leaf.dtype), offset + at // leaf.dtype.itemsize
        return base.as_strided(leaf.shape, leaf.stride(), offset)

    def _step(self, note: Note) -> Step:
        args, kwargs = tree_map(self._moved, (tuple(note.args), dict(note.kwargs)))
        if note.is_kernel:
            return note.function, as_pointers(args), {}
        operation: Any = note.function
        if note.writes:
            return operation._op, args, kwargs
        results = {i: self._moved(r) for i, r in enumerate(note.results) if _storage(r) in self._at}
        if len(note.results) == 1 and (variant := _out_variant(operation)) is not None:
            quick = _QUICK.get(str(variant), variant._op)
            return quick, args, {**kwargs, "out": results[0]}
        return _copying, (operation._op, args, kwargs, results), {}


def _copying(
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Mapping[int, torch.Tensor],
) -> None:
    results = tree_leaves(operation(*args, **kwargs))
    for index, target in targets.items():
        target.copy_(results[index])


def _out_variant(operation: Any) -> Any:
    """Return the operation that does the same and writes where it is told, if there is one."""
    wanted = [(a.name, str(a.type)) for a in operation._schema.arguments]
    packet = operation.overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if given == wanted and [a.name for a in arguments if a.is_out] == ["out"]:
            return getattr(packet, name)
    return None


def _storage(tensor: torch.Tensor) -> int:
    if tensor.is_mkldnn:
        # oneDNN's own form: nothing has a part of it.
        return id(tensor)
    # The address of the memory would not do: empty tensors have none.
    return int(tensor.untyped_storage()._cdata)


def _needed(notes: Sequence[Note], output: torch.Tensor) -> list[Note]:
    """Return the notes that count: to look at a tensor in another shape is nothing to do."""
    alive, kept = {_storage(output)}, []
    for note in reversed(notes):
        operands = {_storage(tensor) for tensor in note.operands}
        made = {_storage(tensor) for tensor in note.results} - operands
        if note.writes or (made & alive and not note.only_makes_room):
            alive |= operands
            kept.append(note)
    return kept[::-1]


def _lives(notes: Sequence[Note], needed: Sequence[Note], output: torch.Tensor) -> dict[int, Life]:
    """Return what is made on the way and needed, by its storage."""
    sizes: dict[int, int] = {}
    for note in notes:
        operands = {_storage(tensor) for tensor in note.operands}
        for result in note.results:
            if (storage := _storage(result)) not in operands:
                sizes[storage] = result.untyped_storage().nbytes()
    first: dict[int, int] = {}
    last = {_storage(output): len(needed)}
    for index, note in enumerate(needed):
        for tensor in (*note.results, *note.operands):
            first.setdefault(_storage(tensor), index)
        for tensor in note.operands:
            last[_storage(tensor)] = max(index, last.get(_storage(tensor), 0))
    return {s: Life(sizes[s], first[s], last[s]) for s in last if s in sizes and s in first}
