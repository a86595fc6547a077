"""The endpoints of releases, for operators."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import UsageError
from llmserve_gateway.bodies import read_json
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import Body, Field
from llmserve_gateway.gateway import Gateway
from llmserve_gateway.generation_fields import MODEL
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import json_response
from llmserve_gateway.releases.release import Release


def _share(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise bad_request(f"{name} must be above 0 and at most 1", name)
    return float(value)


_SHARE: Field[float | None] = Field(
    "share", "The share of users, from 0 to 1; without one, all.", _share,
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
)  # fmt: skip
PROMOTION = Body(MODEL, _SHARE)
ABORTION = Body(MODEL)


class ReleaseRoutes:
    """The endpoints of a gateway that may have no release."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._releases = gateway.releases

    async def status(self, request: Request, key: Key | None) -> Response:
        del request
        self._check(key)
        allowed = [
            release.to_json()
            for name, release in self._releases.of.items()
            if key is None or key.allows(name)
        ]
        return json_response({"releases": allowed})

    async def promote(self, request: Request, key: Key | None) -> Response:
        self._check(key)
        values = PROMOTION.read(await read_json(request.receive, request.headers))
        release = self._release(values[MODEL], key)
        try:
            release.promote(share if (share := values[_SHARE]) is not None else 1.0)
        except UsageError as error:
            raise ApiError(409, str(error), param="share", code="conflict") from None
        return json_response(release.to_json())

    async def abort(self, request: Request, key: Key | None) -> Response:
        self._check(key)
        values = ABORTION.read(await read_json(request.receive, request.headers))
        release = self._release(values[MODEL], key)
        release.abort()
        return json_response(release.to_json())

    def _check(self, key: Key | None) -> None:
        if not (key.operator if key else self._gateway.settings.local):
            what = "this key may not see releases" if key else "to see releases takes a key"
            raise ApiError(403, f"{what}: llmserve key new NAME --operator makes one that may")

    def _release(self, name: str, key: Key | None) -> Release:
        self._gateway.check_model(key, name)
        if (release := self._releases.of.get(name)) is None:
            what = f"there is no release of {name[:200]!r}: start with --shadow or --canary"
            raise ApiError(404, what, param="model", code="not_found")
        return release
