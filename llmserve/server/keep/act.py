"""Carries out what is decided. What comes of it is seen in a later picture, and nowhere else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from llmserve.errors import LLMServeError, ServerError, reason
from llmserve.repository.repository import Model, Repository
from llmserve.server.keep import actions, health, known_answers, live_answers
from llmserve.server.keep.actions import Action
from llmserve.server.keep.desired import Hold
from llmserve.server.keep.observe import FrontendHandle, RunningTriton
from llmserve.server.keep.picture import Checked, HasRead, StartPicture
from llmserve.server.run.fault_hook import tell_fault
from llmserve.server.run.frontend import start_again
from llmserve.server.run.readiness import ModelsFailedError
from llmserve.server.settings import ServerSettings
from llmserve.server.startup import start


class Actor:
    """Acts on these Tritons and frontends; ``notify`` is called with lines for the operator."""

    def __init__(
        self,
        tritons: Sequence[RunningTriton],
        frontends: Sequence[FrontendHandle],
        notify: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self._tritons = tritons
        self._frontends = frontends
        self._notify = notify
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def act(self, actions_: Iterable[Action]) -> None:
        for action in actions_:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case actions.Tell(line, triton):
                self._tell(line, triton)
            case actions.Grant(hold):
                hold.grant()
            case actions.Inform(hold, place, going):
                hold.change(place, going=going)
            case actions.Refuse(whom, error):
                if isinstance(whom, Hold):
                    whom.refuse(error)
                elif not whom.done.done():
                    whom.done.set_exception(error)
            case actions.Fulfil(order):
                if not order.done.done():
                    order.done.set_result(None)
            case actions.StartFrontend(number):
                self._frontends[number].is_busy = True
                self._begin(self._start_frontend(self._frontends[number]))
            case _:
                self._act_on_triton(action, self._tritons[action.triton])

    def _act_on_triton(
        self,
        action: actions.Start
        | actions.Stop
        | actions.Load
        | actions.Drop
        | actions.Kill
        | actions.StopTrying
        | actions.CheckAnswer
        | actions.ReadAhead
        | actions.ReportFault,
        running: RunningTriton,
    ) -> None:
        match action:
            case actions.Load(models=names):
                self._load(running, names)
            case actions.Drop(models=names):
                for name in names:
                    # It may have been withdrawn meanwhile, which is the same. A Triton that cannot
                    # unload it any more is restarted without it.
                    with suppress(OSError, LLMServeError):
                        running.server.drop(name)
            case actions.Kill(model=name, processes=processes, is_death=is_death):
                running.server.stubs.kill(name, processes, is_death=is_death)
            case actions.StopTrying(model=name, loaded_before=before):
                running.withdrawn.add(name)
                self._begin(self._stop_trying(running, name, loaded_before=before))
            case actions.CheckAnswer():
                self._check_answer(running, action)
            case actions.ReadAhead(model=name):
                running.being_read.add(name)
                self._ask(self._read_ahead(running, name))
            case actions.ReportFault():
                if running.settings.on_fault:
                    self._begin(self._report_fault(running, action))
            case actions.Start(number, names):
                running.is_busy = True
                self._begin(self._start(running, number, names))
            case actions.Stop():
                running.is_busy = True
                self._begin(self._stop(running))

    async def settle(self) -> None:
        """Wait for what is under way; a start is cut short."""
        self._is_stopping = True
        for question in self._questions:
            question.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()

    def _tell(self, line: str, triton: int | None) -> None:
        self._notify(line if triton is None else f"replica {triton + 1}: {line}")

    # What takes time

    def _load(self, running: RunningTriton, names: Sequence[str]) -> None:
        # Log lines about the previous models no longer count.
        running.log.read()
        for name in names:
            running.log.forget(name)
            running.not_asked.pop(name, None)
        for name in names:
            try:
                running.server.renew(name)
            except (OSError, LLMServeError) as error:
                # One of the system: Triton is told by files, for which there may be no place.
                running.not_asked[name] = _why(error)
                return

    def _check_answer(self, running: RunningTriton, asked: actions.CheckAnswer) -> None:
        running.being_checked.add(asked.model)
        self._ask(self._ask_again(running, asked))

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        """Ask a model something that nobody waits for when all is ended."""
        task = self._begin(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _read_ahead(self, running: RunningTriton, name: str) -> None:
        """Have a model read its warm prompts; that is seen in a later picture."""
        from llmserve.client import connect_async

        began, load_number = time.monotonic(), running.load_number(name)
        settings, tokens, problems = running.settings, 0, list[str]()
        try:
            async with connect_async(running.server.grpc_url) as client:
                for prompt in settings.warm_prompts[name]:
                    try:
                        within = settings.ready_timeout
                        tokens += await health.have_read(client, name, prompt.text, within)
                    except Exception as error:  # whatever it is, the model answers all the same
                        problems.append(f"{prompt.file}: {_why(error)}")
        finally:
            running.being_read.discard(name)
            took = time.monotonic() - began
            running.has_read.append(HasRead(name, load_number, took, tokens, tuple(problems)))

    async def _ask_again(self, running: RunningTriton, asked: actions.CheckAnswer) -> None:
        """Ask a model one of its known answers again; that is seen in a later picture."""
        from llmserve.client import connect_async

        name = asked.model
        began, load_number = time.monotonic(), running.load_number(name)
        known, fault, problem, unjudged = 0, None, "", ""
        try:
            async with connect_async(running.server.grpc_url) as client:
                answers = await self._known_answers(client, running, name, load_number)
                known = answers.count
                if asked.live is None:
                    # That they were made, once, is no part of how long a check takes.
                    began = time.monotonic()
                    fault = await known_answers.check(client, name, answers, asked.number)
                else:
                    explained = await self._explained(client, running, name, load_number, answers)
                    began = time.monotonic()
                    judge = live_answers.judge_again if asked.anew else live_answers.judge
                    fault = await judge(client, name, asked.live, explained)
                    model = Model(running.settings.repository / name)
                    live_answers.check_adapter(asked.live, model)
        except live_answers.UnjudgedError as error:
            unjudged = _why(error)
        except Exception as error:  # whatever it is, it says nothing of the answers
            problem = _why(error)
        finally:
            running.being_checked.discard(name)
            took = time.monotonic() - began
            checked = Checked(name, load_number, took, known, fault, problem, unjudged)
            running.checked.append(checked)

    async def _explained(
        self,
        client: Any,
        running: RunningTriton,
        name: str,
        load_number: int,
        answers: known_answers.KnownAnswers,
    ) -> float:
        """Return what rounding explains of a user's answer, measured once for each load."""
        number, explained = running.explained.get(name, (-1, 0.0))
        if number != load_number:
            explained = await live_answers.measure(client, name, answers)
            running.explained[name] = load_number, explained
        return explained

    async def _known_answers(
        self, client: Any, running: RunningTriton, name: str, load_number: int
    ) -> known_answers.KnownAnswers:
        number, found = running.known.get(name, (-1, None))
        if found is None or number != load_number:
            model = Repository.open(running.settings.repository).model(name)
            found, not_kept = await known_answers.find(client, name, model)
            running.known[name] = load_number, found
            if not_kept:
                self._notify(f"note: what {name} answers is only known until it ends: {not_kept}")
        return found

    async def _report_fault(self, running: RunningTriton, found: actions.ReportFault) -> None:
        number = self._tritons.index(running)
        content = {
            "model": found.model,
            "replica": number + 1,
            "url": running.server.grpc_url,
            "fingerprint": running.files(found.model).fingerprint,
            "fault": None if found.fault is None else asdict(found.fault),
        }
        try:
            await asyncio.to_thread(tell_fault, running.settings.on_fault, content)
        except (OSError, ServerError) as error:
            self._notify(f"note: --on-fault was not told of {found.model}: {_why(error)}")

    async def _stop_trying(self, running: RunningTriton, name: str, *, loaded_before: bool) -> None:
        """See workarounds.TRIED_AGAIN."""
        server = running.server
        try:
            await asyncio.to_thread(server.stop_trying, name, loaded_before=loaded_before)
        finally:
            running.withdrawn.discard(name)

    async def _stop(self, running: RunningTriton) -> None:
        try:
            await asyncio.to_thread(running.server.stop, grace=0.0)
        finally:
            running.is_busy = False

    async def _start(self, running: RunningTriton, number: int, names: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(running.server.stop, grace=0.0)
            server = await asyncio.to_thread(
                start,
                _settings(running, names),
                on_progress=self._cancel_if_stopping,
                notify=lambda line: self._tell(f"triton: {line}", self._number_of(number)),
            )
        except Exception as error:  # whatever it is, it is tried again, and given up at last
            failures = error.failures if isinstance(error, ModelsFailedError) else {}
            running.start = StartPicture(_why(error), failures)
        else:
            running.take_over(server)
            running.start = StartPicture("", server.failures, server.renewable)
        finally:
            running.is_busy = False

    def _number_of(self, triton: int) -> int | None:
        return triton if len(self._tritons) > 1 else None

    def _cancel_if_stopping(self, _: object) -> None:
        if self._is_stopping:
            raise ServerError("interrupted")

    async def _start_frontend(self, handle: FrontendHandle) -> None:
        try:
            handle.running = await asyncio.to_thread(
                start_again, handle.running, self._cancel_if_stopping
            )
            handle.start = StartPicture()
        except Exception as error:  # whatever it is, it is tried again
            handle.start = StartPicture(_why(error))
        finally:
            handle.is_busy = False


def _why(error: Exception) -> str:
    return error.problem if isinstance(error, LLMServeError) else reason(error)


def _settings(running: RunningTriton, names: Sequence[str]) -> ServerSettings:
    ports = running.server.ports
    return replace(
        running.settings,
        models=tuple(names),
        empty=not names,
        http_port=ports.http,
        grpc_port=ports.grpc,
        metrics_port=ports.metrics,
    )
