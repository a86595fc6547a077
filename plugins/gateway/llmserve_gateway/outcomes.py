"""What becomes of requests: told to the client, and noted in log, metrics, spans and usage."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING

from llmserve.errors import LLMServeError, RequestCancelledError
from llmserve_gateway.bodies import ClientDisconnected
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.key_usage import KeyUsage
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.reply import Reply

if TYPE_CHECKING:
    from llmserve_gateway.tracing import Trace, Tracer

log = logging.getLogger("llmserve.gateway")


class Outcomes:
    """Has requests answered, says what goes wrong, and notes how each has ended."""

    def __init__(
        self,
        catalog: Catalog,
        metrics: Metrics,
        *,
        key_usage: KeyUsage | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self.key_usage = key_usage
        """What counts what keys use, if there are any."""
        self.tracer = tracer
        """What makes spans of requests, if they are sent anywhere."""

    def trace(self, headers: Mapping[str, str], operation: str) -> Trace | None:
        """Start the span of a request, if there are spans; ``record`` ends it."""
        return self.tracer.start(headers, operation) if self.tracer else None

    async def record(self, reply: Reply, trace: Trace | None, answering: Awaitable[None]) -> None:
        """Have a request answered, say what has gone wrong, and record its outcome."""
        record = reply.record
        try:
            await answering
        except (ClientDisconnected, asyncio.CancelledError, RequestCancelledError):
            record.outcome, record.status = "cancelled", 499
        except ApiError as error:
            await reply.fail(error)
        except LLMServeError as error:
            if record.model:
                waited = time.perf_counter() - (record.admitted or record.arrived)
                self._catalog.record_failure(record.model, error, waited)
            await reply.fail(from_llmserve(error, reply.sent))
        except Exception:
            log.exception("request %s", record.id)
            await reply.fail(ApiError(500, "the gateway failed: see its log"))
        finally:
            record.ended = time.perf_counter()
            self._metrics.count_request(record)
            if self.key_usage is not None and record.admitted is not None:
                self.key_usage.note(record.key, record.input_tokens, record.output_tokens)
            if trace is not None:
                trace.end(record)
            print(record.log_line(), file=sys.stderr, flush=True)  # noqa: T201

    async def close(self) -> None:
        """Write what is counted, and send the remaining spans."""
        if self.key_usage is not None:
            await self.key_usage.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
