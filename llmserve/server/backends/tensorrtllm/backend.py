"""The stand-in itself: takes requests, makes steps for all of them, sends what comes.

One thread makes the steps. In flight, requests join between two of them, as with
``inflight_fused_batching``. With ``V1``, and under the LLM API with ``STATIC_BATCH``, what has come
while a batch ran is the next one, which runs to its end; Triton itself need not have gathered it.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.server.backends.telling import Notice
from llmserve.server.backends.tensorrtllm.flight import Flight
from llmserve.server.backends.tensorrtllm.reading import read_rows
from llmserve.server.backends.tensorrtllm.settings import Settings
from llmserve.server.backends.tensorrtllm.stepper import make_stepper


class TritonPythonModel:
    """An engine's model, as Triton's Python backend loads it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model that the engine was built from; Triton calls this once."""
        import triton_python_backend_utils as pb_utils

        settings = Settings.read(args["model_name"], json.loads(args["model_config"]))
        self._stand_in = StandIn(settings, pb_utils)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; the answers leave through their senders."""
        self._stand_in.execute(requests)

    def finalize(self) -> None:
        """Stop; Triton calls this once nothing is under way any more."""
        stand_in = getattr(self, "_stand_in", None)
        if stand_in is not None:
            stand_in.finalize()


class StandIn:
    """Answers an engine's tensors with PyTorch."""

    def __init__(self, settings: Settings, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._settings = settings
        self._stepper, self._context, what = make_stepper(settings)
        way = "static batches" if settings.static else "in-flight batching"
        self._notice = Notice(
            pb_utils, settings.name, "TensorRT-LLM", f"PyTorch with {what} and {way}"
        )
        self._flights: list[Flight] = []
        self._arrived: list[Flight] = []
        self._closing = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; the answers leave through their senders."""
        taken = [flight for raw in requests if (flight := self._take(raw)) is not None]
        with self._news:
            self._arrived += taken
            self._news.notify_all()

    def finalize(self) -> None:
        """Stop, once nothing is under way any more."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join()
        self._notice.close()

    def _take(self, raw: Any) -> Flight | None:
        given = {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}
        flight = Flight(raw, given, self._settings, self._pb)
        if "stop" in given and given["stop"].any():
            self._stop(flight)
            return None
        try:
            flight.rows = read_rows(given, self._context, flight.is_cancelled)
        except RequestError as error:
            flight.fail(str(error), internal=False)
        except Exception as error:
            self._fail(flight, error)
        else:
            return flight
        return None

    def _stop(self, stopping: Flight) -> None:
        """A request that says stop ends the one that has its id."""
        with self._news:
            for flight in (*self._flights, *self._arrived):
                if flight.request_id == stopping.request_id:
                    flight.cancel()
        stopping.close()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._arrived or self._closing or self._stepper.busy)
                if self._closing and not self._stepper.busy and not self._arrived:
                    return
                joining = self._joining()
            for flight in joining:
                self._admit(flight)
            self._step()
            with self._news:
                self._flights = [flight for flight in self._flights if not flight.closed]
                self._news.notify_all()

    def _joining(self) -> list[Flight]:
        """Take those that begin now: all who have come, or the next batch when none runs."""
        count, rows = len(self._arrived), 0
        if self._settings.static:
            count = 0
            for flight in () if self._flights else self._arrived:
                rows += len(flight.rows)
                if count and rows > self._settings.max_batch_size:
                    break
                count += 1
        joining, self._arrived = self._arrived[:count], self._arrived[count:]
        return joining

    def _admit(self, flight: Flight) -> None:
        try:
            for row in flight.rows:
                self._stepper.admit(row)
        except RequestError as error:
            self._drop(flight)
            flight.fail(str(error), internal=False)
        else:
            self._flights.append(flight)

    def _step(self) -> None:
        try:
            failed: list[tuple[Generation, Exception]] = self._stepper.step().failed
        except Exception as raised:
            failed = [(row, raised) for flight in self._flights for row in flight.rows]
        for generation, error in failed:
            for flight in self._flights:
                if generation in flight.rows and not flight.closed:
                    self._drop(flight)
                    self._fail(flight, error)
        for flight in self._flights:
            flight.tell()

    def _drop(self, flight: Flight) -> None:
        for row in flight.rows:
            self._stepper.drop(row)

    def _fail(self, flight: Flight, error: Exception) -> None:
        self._pb.Logger.log_error("".join(traceback.format_exception(error)))
        flight.fail(f"the stand-in failed: {type(error).__name__}: {error}", internal=True)
