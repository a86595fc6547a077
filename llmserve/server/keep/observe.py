"""Looks at the processes, the log, the files and the answers of a ``serve``, and makes a picture.

Whatever takes time is asked for in the background: a picture has what is known by then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmserve.errors import ServerError, reason
from llmserve.repository.repository import Model, Repository
from llmserve.server.keep.health import INTERVAL, SLOW, SLOW_FRONTEND, Monitor
from llmserve.server.keep.known_answers import KnownAnswers
from llmserve.server.keep.memory import FrontendMemory, TritonMemory
from llmserve.server.keep.picture import (
    Canary,
    Checked,
    FrontendPicture,
    HasRead,
    Heard,
    ModelPicture,
    StartPicture,
    TritonPicture,
)
from llmserve.server.run.activity import Activity, Stops
from llmserve.server.run.ends import End
from llmserve.server.run.frontend import RunningFrontend
from llmserve.server.run.log import ServerLog
from llmserve.server.run.machine import resources
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmserve.client import AsyncClient

CHECK_INTERVAL = 0.25
"""Seconds between two looks at the processes."""
_AGAIN = 1.0
"""Seconds until a Triton that has not answered is asked again."""
_SILENT = 5.0
"""Seconds after which a Triton that does nothing either is silent."""
_ASKED_EVERY = CHECK_INTERVAL / 5
"""Seconds between two questions to Triton about models that are loaded or unloaded."""
_LAST_WORDS = 2.0
"""Seconds before an end in which a line of the log may explain it."""


@dataclass
class RunningTriton:
    """A Triton, and what is under way with it; another server after each start."""

    settings: ServerSettings
    server: Server
    is_busy: bool = False
    """Whether it is being started or ended."""
    start: StartPicture | None = None
    """What came of a start that nobody has seen yet."""
    not_asked: dict[str, str] = field(default_factory=dict)
    """Why it could not be asked to load a model."""
    withdrawn: set[str] = field(default_factory=set)
    """The models that it is kept from trying again and again."""
    known: dict[str, tuple[int, KnownAnswers]] = field(default_factory=dict)
    """The known answers of each model, and of which of its loads they are."""
    explained: dict[str, tuple[int, float]] = field(default_factory=dict)
    """What rounding explains of its users' answers, and in which of its loads that was measured."""
    being_checked: set[str] = field(default_factory=set)
    """The models that are asked one of their known answers at the moment."""
    being_read: set[str] = field(default_factory=set)
    """The models that read their warm prompts at the moment."""
    has_read: list[HasRead] = field(default_factory=list)
    """What came of that and that nobody has seen yet."""
    checked: list[Checked] = field(default_factory=list)
    """What came of such questions that nobody has seen yet."""

    def __post_init__(self) -> None:
        self.log = ServerLog(self.server.log_file)
        self._earlier_loads: Counter[str] = Counter()
        self._starts = 0
        self._files: dict[str, tuple[int, Model]] = {}

    def take_over(self, server: Server) -> None:
        """Go on with a server that was started in place of this one."""
        self._starts += 1
        self._earlier_loads += self.log.loads
        self.server = server
        self.log = ServerLog(server.log_file)
        self.not_asked = {}

    def load_number(self, name: str) -> int:
        """Return which of its loads a model has: another number after each, and after a start."""
        return self._starts + self._earlier_loads[name] + self.log.loads[name]

    def files(self, name: str) -> Model:
        """Return the files of a model, which are read once for each of its loads."""
        number = self.load_number(name)
        if name not in self._files or self._files[name][0] != number:
            self._files[name] = number, Repository.open(self.settings.repository).model(name)
        return self._files[name][1]

    @property
    def is_seen(self) -> bool:
        """Whether its process is seen: that of a container here only shows what it prints."""
        return self.settings.runtime != "docker"


@dataclass
class _Asked:
    """A model, or a Triton or frontend without a name, that is asked for a sign of life."""

    name: str
    heard: list[Canary]
    load_number: int = -1
    alive: bool = True

    def answered(self, _: float) -> None:
        self._hear(Heard.ANSWERED)

    def missed(self, _: float, why: str) -> None:
        self._hear(Heard.MISSED, why)

    def died(self, _: float, why: str) -> None:
        self._hear(Heard.DIED, why)

    def works(self, _: float, why: str) -> None:
        self._hear(Heard.WORKS, why)

    def _hear(self, heard: Heard, why: str = "") -> None:
        self.heard.append(Canary(heard, self.name, why, self.load_number))


class TritonObserver:
    """Looks at one Triton; made on a running loop.

    ``memory`` says which of its models there is something to see of. ``wake`` is called when
    something new is known.
    """

    def __init__(
        self,
        running: RunningTriton,
        memory: TritonMemory,
        wake: Callable[[], None],
        *,
        asks_for_tokens: bool = True,
    ) -> None:
        self._running = running
        self._memory = memory
        self._wake = wake
        self._stops = Stops()
        self._heard: list[Canary] = []
        self._client: AsyncClient | None = None
        self._monitor = Monitor(self._connected, self._alive, self, slow=SLOW)
        self._tasks = [asyncio.create_task(self._send_canaries())] if asks_for_tokens else []
        self._looked_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._takes_requests: dict[str, tuple[bool | None, float]] = {}
        self._answers: Mapping[str, int] = {}
        self._in_triton: dict[str, bool] = {}

    def failing(self, name: str) -> str:
        """Return why a model fails its canaries, or "" if it does not do so repeatedly."""
        return self._monitor.failing(name)

    def look(self, now: float, offered: Collection[str] = ()) -> TritonPicture:
        """Return what is seen now of the models that there are, and of those on offer."""
        running, memory = self._running, self._memory
        start, running.start = running.start, None
        canaries, self._heard[:] = tuple(self._heard), []
        if running.is_busy:
            return TritonPicture(is_busy=True, start=start)
        checked, running.checked[:] = tuple(running.checked), []
        has_read, running.has_read[:] = tuple(running.has_read), []
        ended = running.server.wait(0) is not None
        running.log.read()
        loading = running.log.progress(0).loading
        died, given_up, stopped = self._look_at_processes(loading, now)
        of_interest = memory.of_interest
        self._ask_about(memory.to_be_asked, of_interest, now)
        names = dict.fromkeys([*memory.models, *of_interest, *offered, *given_up])
        is_dying = bool(died) or any(m.died_at is not None for m in memory.models.values())
        return TritonPicture(
            models={
                name: self._look_at_model(
                    name, died.get(name), given_up.get(name, frozenset()),
                    is_stopped=name in stopped, is_loading=name in loading,
                    is_of_interest=name in of_interest,
                )
                for name in names
            },
            ended=running.server.process.why_it_ended() or "for no known reason" if ended else "",
            is_stopped=running.is_seen and bool(self._stops.check([running.server.pid], now)),
            is_stuck=bool(running.log.stuck),
            start=start,
            canaries=canaries,
            checked=checked,
            has_read=has_read,
            seconds=self._own_seconds(),
            is_hidden=not running.is_seen,
            last_words=running.log.last_words(time.monotonic() - _LAST_WORDS),
            resources=resources() if is_dying else "",
        )  # fmt: skip

    def _own_seconds(self) -> float:
        """Return the processor time of Triton itself, if answers are checked."""
        running = self._running
        return Activity.of([running.server.pid]).seconds if running.settings.certify else 0.0

    def _look_at_processes(
        self, loading: Collection[str], now: float
    ) -> tuple[dict[str, End], dict[str, frozenset[int]], set[str]]:
        """Return which models have a process that has died, is given up, or is stopped.

        One is dead if it is a zombie twice in a row (workarounds.CRASHED), so that they are not
        looked at more often.
        """
        if now - self._looked_at < CHECK_INTERVAL * 0.9:
            return {}, {}, set()
        self._looked_at, stubs = now, self._running.server.stubs
        died = stubs.poll(loading)
        given_up: dict[str, frozenset[int]] = {}
        for process, name in stubs.given_up(loading, now).items():
            given_up[name] = given_up.get(name, frozenset()) | {process}
        return died, given_up, stubs.stopped(now)

    def _look_at_model(
        self,
        name: str,
        died: End | None,
        given_up: frozenset[int],
        *,
        is_stopped: bool,
        is_loading: bool,
        is_of_interest: bool,
    ) -> ModelPicture:
        running = self._running
        log, stubs = running.log, running.server.stubs
        takes_requests, asked_at = self._takes_requests.get(name, (None, 0.0))
        return ModelPicture(
            has_folder=(running.settings.repository / name).is_dir(),
            not_asked=running.not_asked.get(name, ""),
            load_number=running.load_number(name),
            is_loaded=log.loads_since(name) > 0,
            failure=log.failures.get(name, ""),
            raised=log.raised.get(name, ""),
            is_loading=is_loading,
            is_hopeless=name in log.hopeless,
            is_unhealthy=name in log.unhealthy,
            processes=frozenset(stubs.of(name)),
            died=died,
            is_stopped=is_stopped,
            given_up=given_up,
            seconds=stubs.seconds(name) if is_of_interest or running.settings.certify else 0.0,
            answers=self._answers.get(name, 0) if self._in_triton.get(name) else 0,
            takes_requests=takes_requests if is_of_interest else None,
            asked_at=asked_at,
            is_asked_for_token=self._monitor.is_asking_for(name)
            or name in running.being_checked | running.being_read,
            is_being_withdrawn=name in running.withdrawn,
            runs_in_triton=running.files(name).runs_in_triton
            if running.settings.certify
            else self._in_triton.get(name, False),
        )

    # What Triton is asked

    def _ask_about(self, names: Collection[str], of_interest: frozenset[str], now: float) -> None:
        """Have Triton asked about models, a few times a second."""
        if not of_interest:
            self._in_triton.clear()
            self._takes_requests.clear()
            return
        if new := of_interest - self._in_triton.keys():
            repository = Repository.open(self._running.settings.repository)
            self._in_triton |= {name: repository.model(name).runs_in_triton for name in new}
        stubs = self._running.server.stubs
        counted = any(self._in_triton[name] and not stubs.of(name) for name in of_interest)
        is_idle = self._asking is None or self._asking.done()
        if (names or counted) and is_idle and now - self._asked_at >= _ASKED_EVERY:
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask(frozenset(names), counted=counted))

    async def _ask(self, names: Collection[str], *, counted: bool) -> None:
        """Ask Triton about these models; one that hangs may answer later."""
        server, began = self._running.server, time.monotonic()
        found, answers = await asyncio.to_thread(_ask_triton, server, names, counted=counted)
        if server is self._running.server:
            self._takes_requests |= {name: (takes, began) for name, takes in found.items()}
            self._answers = answers or self._answers
            self._wake()

    async def _send_canaries(self) -> None:
        triton = _Asked("", self._heard)
        while True:
            await asyncio.sleep(_AGAIN if self._memory.triton.misses else INTERVAL)
            if not self._memory.triton.alive or self._running.is_busy:
                continue
            server = self._running.server
            try:
                await self._monitor.check()
            except Exception as error:  # whatever it is, the next check is still due
                if server is self._running.server:
                    triton.missed(time.monotonic(), reason(error))
            else:
                triton.answered(time.monotonic())

    def _alive(self) -> Iterator[_Asked]:
        models = self._memory.models
        parts = {part for model in models.values() for part in model.parts}
        for name, model in models.items():
            if model.alive and name not in parts:
                yield _Asked(name, self._heard, self._running.load_number(name))

    def _connected(self) -> AsyncClient:
        if self._client is None:
            from llmserve.client import connect_async

            self._client = connect_async(self._running.server.grpc_url)
        return self._client

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._asking] if self._asking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    # What shows that models are alive without asking them

    async def answers(self) -> Mapping[str, int]:
        """Ask Triton, with more patience while it works."""
        server = self._running.server
        asked = asyncio.ensure_future(asyncio.to_thread(server.answers))
        before = Activity.of([server.pid])
        while not (await asyncio.wait({asked}, timeout=_SILENT))[0] and self._running.is_seen:
            now = Activity.of([server.pid])
            if not now.is_work_since(before):
                # Who waits for it has given up, and its error is this one.
                asked.add_done_callback(lambda task: task.cancelled() or task.exception())
                raise ServerError(f"no answer in {_SILENT:g} s, and it does nothing")
            before = now
        return await asked

    def seconds(self) -> Mapping[str, float]:
        names, stubs = [*self._memory.models], self._running.server.stubs
        return {name: sum(map(stubs.seconds, self._memory.with_parts(name))) for name in names}

    def load_number(self, name: str) -> int:
        return self._running.load_number(name) if name in self._memory.models else -1

    def has_processes(self, name: str) -> bool:
        repository = Repository.open(self._running.settings.repository)
        stubs = self._running.server.stubs
        names = [
            part
            for part in self._memory.with_parts(name)
            if repository.model(part).is_python or stubs.of(part)
        ]
        return bool(names) and all(map(stubs.of, names))


def _ask_triton(
    server: Server, names: Collection[str], *, counted: bool
) -> tuple[dict[str, bool], Mapping[str, int]]:
    found: dict[str, bool] = {}
    answers: Mapping[str, int] = {}
    # It ends, or hangs.
    with suppress(ServerError):
        for name in names:
            found[name] = server.takes_requests(name)
        answers = server.answers() if counted else {}
    return found, answers


@dataclass(frozen=True)
class FrontendTimes:
    """How a frontend is asked for a sign of life; the times are in seconds."""

    interval: float = INTERVAL
    timeout: float = SLOW_FRONTEND
    patience: float = 60.0
    """For how long it may work without any answer."""


@dataclass
class FrontendHandle:
    """A frontend, and what is under way with it; another process after each start."""

    running: RunningFrontend
    is_busy: bool = False
    start: StartPicture | None = None


class FrontendObserver:
    """Looks at one frontend; made on a running loop."""

    def __init__(
        self, handle: FrontendHandle, memory: FrontendMemory, times: FrontendTimes
    ) -> None:
        self._handle = handle
        self._memory = memory
        self._stops = Stops()
        self._heard: list[Canary] = []
        self._asking = asyncio.create_task(self._ask(times.interval, times.timeout, times.patience))

    def look(self, now: float) -> FrontendPicture:
        handle = self._handle
        start, handle.start = handle.start, None
        canaries, self._heard[:] = tuple(self._heard), []
        if handle.is_busy:
            return FrontendPicture(is_busy=True, start=start)
        process, ended = handle.running.process, ""
        if process.wait(0) is not None:
            ended = handle.running.why_it_ended()
        is_stopped = not ended and bool(self._stops.check([process.pid], now))
        return FrontendPicture(ended, is_stopped, start=start, canaries=canaries)

    async def _ask(self, interval: float, timeout: float, patience: float) -> None:
        """Send it a request regularly: one that hangs still runs, but reacts to none.

        One that works meanwhile does not hang, unless that goes on for longer than ``patience``.
        """
        asked, handle = _Asked("", self._heard), self._handle
        silent: tuple[RunningFrontend, float] | None = None
        while handle.running.frontend.health:
            await asyncio.sleep(interval)
            if not self._memory.alive or handle.is_busy:
                continue
            running = handle.running
            before = await asyncio.to_thread(running.activity)
            reacts = await asyncio.to_thread(running.reacts, timeout)
            if running is not handle.running:
                continue
            now, why = time.monotonic(), f"no answer in {timeout:g} s"
            if reacts:
                asked.answered(now)
                silent = None
                continue
            if silent is None or silent[0] is not running:
                # When it was first asked for what it has not answered since.
                silent = running, before.at
            works = (await asyncio.to_thread(running.activity)).is_work_since(before)
            if works and now - silent[1] < patience:
                asked.works(now, f"{why}, while it works")
            else:
                asked.missed(now, why)

    async def close(self) -> None:
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
