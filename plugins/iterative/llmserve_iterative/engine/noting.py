"""What a pass over a model does: every operation and kernel, with what it works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotPlayable(Exception):
    """What the model's code does depends on numbers, or cannot be repeated."""


@dataclass(frozen=True)
class Note:
    """One operation, and what came of it; a kernel returns nothing and writes where it is told."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...] = ()

    @property
    def operands(self) -> Iterator[torch.Tensor]:
        """The tensors that it reads, and those that it is told to write to."""
        for leaf in tree_leaves((self.args, dict(self.kwargs))):
            if isinstance(leaf, torch.Tensor):
                yield leaf

    @property
    def is_kernel(self) -> bool:
        """Whether it is one of our own, which takes tensors as pointers."""
        return not isinstance(self.function, torch._ops.OpOverload)

    @property
    def only_makes_room(self) -> bool:
        """Whether what it makes has no numbers in it yet."""
        return not self.is_kernel and "empty" in str(self.function)

    @property
    def writes(self) -> bool:
        """Whether it changes what it is given."""
        if not isinstance(self.function, torch._ops.OpOverload):
            return True
        arguments = self.function._schema.arguments
        return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what happens while it is entered. What it notes stays alive, each in its own memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and note it."""
        del types
        kwargs = kwargs or {}
        if _depends_on_numbers(func, args):
            raise NotPlayable(f"{func} depends on numbers")
        out = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(out) if leaf is not None]
        results = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if len(results) < len(leaves):
            # A number has come out, and what the code does next may depend on it.
            raise NotPlayable(f"{func} tells a number")
        self.notes.append(Note(func, args, kwargs, results))
        return out

    def kernel(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Note a kernel of our own."""
        self.notes.append(Note(function, args, {}))


def _depends_on_numbers(operation: Any, args: Any) -> bool:
    """Whether what an operation returns, or how large it is, depends on the numbers in it."""
    if operation is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return any(tag in operation.tags for tag in _TAGS)


def invoke(kernel: Callable[..., Any], *args: Any) -> None:
    """Call a kernel of our own; whoever takes notes hears of it."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, Recorder):
        mode.kernel(kernel, args)
    kernel(*as_pointers(args))


def as_pointers(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return a kernel's operands as it takes them: tensors as pointers."""
    return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
