"""What is done about a picture: :mod:`llmserve.server.keep.act` carries it out.

What comes of it is in a later picture. ``triton`` and ``frontend`` are numbers, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.contract.live_answer import LiveAnswer
from llmserve.contract.report import FaultReport
from llmserve.errors import LLMServeError
from llmserve.server.keep.desired import Hold, Order


@dataclass(frozen=True)
class Start:
    """Start a Triton with these models, at the ports of the last one, which is ended."""

    triton: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """End a Triton: one that hangs would keep its clients waiting."""

    triton: int


@dataclass(frozen=True)
class Load:
    """Have Triton load models, parts first; the old ones answer until the new ones are loaded."""

    triton: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Have Triton unload models."""

    triton: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """End processes that Triton would wait for: those of a model, or only ``processes``."""

    triton: int
    model: str
    processes: frozenset[int] | None = None
    is_death: bool = False
    """Whether that is a death that is to be seen later, as if they had ended by themselves."""


@dataclass(frozen=True)
class StopTrying:
    """Have Triton try no more to load a model that has failed to load (TRIED_AGAIN)."""

    triton: int
    model: str
    loaded_before: bool


@dataclass(frozen=True)
class CheckAnswer:
    """Ask a model one of its known answers again; have them made if there are none.

    Or have it judge a user's answer, ``live``, if there is one; ``anew`` what it would answer now.
    """

    triton: int
    model: str
    number: int
    live: LiveAnswer | None = None
    anew: bool = False


@dataclass(frozen=True)
class ReadAhead:
    """Have a model read its warm prompts."""

    triton: int
    model: str


@dataclass(frozen=True)
class ReportFault:
    """Tell who is to know (``--on-fault``) that answers are wrong, or right again: no ``fault``."""

    triton: int
    model: str
    fault: FaultReport | None


@dataclass(frozen=True)
class StartFrontend:
    frontend: int


@dataclass(frozen=True)
class Tell:
    """Print a line for the operator; of one Triton, if there are several."""

    line: str
    triton: int | None = None


@dataclass(frozen=True)
class Grant:
    """Tell who waits for a model that it is loaded, and stays."""

    hold: Hold


@dataclass(frozen=True)
class Inform:
    """Tell who holds or waits for a model its place, and whether the model has to go."""

    hold: Hold
    place: int
    going: bool


@dataclass(frozen=True)
class Refuse:
    """Tell who waits for a model, or has given an order, why that is in vain."""

    whom: Hold | Order
    error: LLMServeError


@dataclass(frozen=True)
class Fulfil:
    """Tell who has given an order that it is carried out."""

    order: Order


Action = (
    Start | Stop | Load | Drop | Kill | StopTrying | CheckAnswer | ReadAhead | ReportFault
    | StartFrontend | Tell | Grant | Inform | Refuse | Fulfil
)  # fmt: skip
