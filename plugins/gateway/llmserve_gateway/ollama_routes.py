"""What Ollama's clients ask besides answers: which models there are, and what they can do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import LLMServeError
from llmserve.runtime.contract import EMBED, GENERATE, IMAGE_URL
from llmserve_gateway.bodies import read_json
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Gateway
from llmserve_gateway.keys import Key
from llmserve_gateway.ollama import VERSION, moment
from llmserve_gateway.ollama_requests import read_named
from llmserve_gateway.openai_answers import json_response
from llmserve_gateway.routes import Routes

_FAMILY = "llmserve"
"""What stands where Ollama has the architecture of a model, which its clients put before names."""
_FOREVER = "9999-12-31T23:59:59Z"
_TASKS = {GENERATE: "completion", EMBED: "embedding"}


class OllamaRoutes:
    """The endpoints of Ollama's API that do not ask a model for an answer."""

    def __init__(self, gateway: Gateway, routes: Routes) -> None:
        self._gateway = gateway
        self._routes = routes

    async def version(self, request: Request, key: Key | None) -> Response:
        del request, key
        return json_response({"version": VERSION})

    async def tags(self, request: Request, key: Key | None) -> Response:
        """Return the models, and by which names they can be asked."""
        del request
        models = [_listed(report) for report in await self._routes.listed(key)]
        return json_response({"models": models})

    async def running(self, request: Request, key: Key | None) -> Response:
        """Return the models that are loaded."""
        del request
        reports = [report for report in await self._routes.listed(key) if report.get("loaded", 1)]
        return json_response({"models": [
            {**_named(report), "expires_at": _FOREVER, "size_vram": 0,
             "context_length": report["max_model_len"] or 0}
            for report in reports
        ]})  # fmt: skip

    async def show(self, request: Request, key: Key | None) -> Response:
        name = await _name(request)
        report = await self._routes.reported(name, key)
        model = (await self._gateway.names.find(name, key)).model
        template = await self._gateway.catalog.chat_template(model)
        context = report["max_model_len"]
        length = {f"{_FAMILY}.context_length": context} if context else {}
        return json_response({
            "modelfile": "", "parameters": "", "template": template or "",
            "details": _DETAILS,
            "model_info": {"general.architecture": _FAMILY, "general.basename": report["id"],
                           **length},
            "capabilities": await self._capabilities(model, report["task"], template),
            "modified_at": moment(report["created"]),
        })  # fmt: skip

    async def pull(self, request: Request, key: Key | None) -> Response:
        """Say that a model is here, or how to have it."""
        name = await _name(request)
        try:
            await self._routes.reported(name, key)
        except ApiError as error:
            if error.status != 404:
                raise
            what = f"there is no model {name[:200]!r} here, and no request downloads one"
            hint = "llmserve build --model OWNER/NAME adds a model to the server"
            raise ApiError(404, f"{what}: {hint}", param="model", code="model_not_found") from None
        return json_response({"status": "success"})

    async def _capabilities(self, model: str, task: str | None, template: str | None) -> list[str]:
        found = [_TASKS[task]] if task in _TASKS else []
        if task != GENERATE:
            return found
        if template is not None:
            # Who has no place for tools in its template is told of them in a message.
            found.append("tools")
        with suppress(LLMServeError, ApiError):
            info = await self._gateway.catalog.info(model)
            found += ["vision"] if IMAGE_URL.name in info.inputs else []
            found += ["insert"] if await self._gateway.catalog.fills_in(model) else []
            found += ["thinking"] if await self._gateway.tools.thinks(info) else []
        return found


# What its clients show of a file, and no model here is one.
_DETAILS: Mapping[str, Any] = {
    "parent_model": "", "format": "", "family": _FAMILY, "families": [_FAMILY],
    "parameter_size": "", "quantization_level": "",
}  # fmt: skip


def _named(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model by the name that Ollama lists, which always has a tag."""
    name = report["id"] if ":" in report["id"] else f"{report['id']}:latest"
    facts = f"{report['id']} {report.get('fingerprint', '')} {report['created']}"
    return {
        "name": name,
        "model": name,
        "size": report.get("size") or 0,
        "digest": hashlib.sha256(facts.encode()).hexdigest(),
        "details": _DETAILS,
    }


def _listed(report: Mapping[str, Any]) -> dict[str, Any]:
    return {**_named(report), "modified_at": moment(report["created"])}


async def _name(request: Request) -> str:
    return read_named(await read_json(request.receive, request.headers))
