"""What can go wrong with a hub, in one line each, and whether to ask it again."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from time import sleep
from typing import Any, Literal, TypeVar

from llmserve.errors import ModelSourceError
from llmserve.packages import install_command
from llmserve.texts import printable

Returned = TypeVar("Returned")

PAUSES = (0.5, 1, 2, 4, 8)
"""The seconds before each time that a hub is asked again, if it does not say how long."""
LONGEST_PAUSE = 120.0
"""The most seconds that are waited because a hub says so."""
_BUSY = {408, 429, 500, 502, 503, 504}
_RESET = re.compile(r'^\s*"?\w+"?\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})')
"""As the hub says when it has refused too many requests: ``"api";r=0;t=55``."""
_TOKEN = re.compile(r"[\x21-\x7e]+")


class HubError(ModelSourceError):
    """A model, or a file of it, that the hub does not give.

    ``cached_will_do`` is whether what was downloaded before can be used instead, and ``reason``
    what is said then: nothing if the user has asked for that.
    """

    def __init__(
        self,
        problem: str,
        *,
        hint: str | None = None,
        cached_will_do: bool = True,
        reason: str | None = None,
    ) -> None:
        super().__init__(problem, hint=hint)
        self.cached_will_do = cached_will_do
        self.reason = problem if reason is None else reason


def token() -> str | Literal[False]:
    """Return the token for the hub; False prevents the use of one that a login stored earlier."""
    found = os.environ.get("HF_TOKEN", "").strip()
    if found and not _TOKEN.fullmatch(found):
        # A library would show it in its error.
        raise HubError("HF_TOKEN is no token of the hub", hint="copy it from your settings again")
    return found or False


def not_understood(repo_id: str) -> HubError:
    return HubError(
        f"what answers for {repo_id} at {_endpoint()} is no hub",
        hint="look at it in a browser: a network may want a login; HF_ENDPOINT names a mirror",
    )


@contextmanager
def requesting(repo_id: str, revision: str = "", file: str = "") -> Iterator[None]:
    """Say in one line why the hub did not answer what it was asked in this block."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise HubError(
            f"{repo_id} is on the hub, but huggingface_hub is not installed",
            hint=f"{install_command('huggingface_hub')}, or name a local folder",
        ) from None
    try:
        yield
    except ModelSourceError:
        raise
    except errors.GatedRepoError:
        access = "your token in HF_TOKEN has none" if token() else "then set HF_TOKEN to your token"
        raise HubError(
            f"{repo_id} is gated", hint=f"request access on its page, {access}"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{repo_id} has no revision {revision!r}",
            hint="see its page for branches and tags",
            cached_will_do=False,
        ) from None
    except errors.RepositoryNotFoundError:
        raise _no_model(repo_id) from None
    except errors.OfflineModeIsEnabled:
        raise _away(repo_id, "") from None
    except errors.EntryNotFoundError:
        raise no_file(repo_id, file) from None
    except errors.HfHubHTTPError as error:
        raise _refused(repo_id, file, error.response) from None
    except connection_errors() as error:
        raise _away(repo_id, words(error)) from None


@contextmanager
def reading_answer(repo_id: str) -> Iterator[None]:
    """Say in one line that an answer is not one of a hub, whatever is wrong with it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        from huggingface_hub.errors import HFValidationError

        if isinstance(error, HFValidationError):
            raise HubError(
                f"{repo_id} is no id on the hub", hint="it is OWNER/NAME, as its page says"
            ) from None
        raise not_understood(repo_id) from None


def _no_model(repo_id: str) -> HubError:
    what = "your token in HF_TOKEN may not see it" if token() else "set HF_TOKEN to your token"
    return HubError(
        f"the hub has no model {repo_id!r}, or it is private",
        hint=f"check the id; for a private model {what}",
    )


def no_file(repo_id: str, file: str) -> HubError:
    return HubError(
        f"{repo_id} has no file {file}",
        hint="see its page for the names of its files",
        cached_will_do=False,
    )


def _away(repo_id: str, why: str) -> HubError:
    endpoint = _endpoint()
    if not why:
        return HubError(
            f"{repo_id} is not in the cache, and the hub cannot be reached: HF_HUB_OFFLINE is set",
            hint="name a local folder, or fill HF_HOME on a machine with a connection",
            reason="",
        )
    return HubError(
        f"{repo_id} is not in the cache, and the hub cannot be reached: {endpoint}: {why}",
        hint="name a local folder, or fill HF_HOME on a machine with a connection; HF_ENDPOINT "
        "names a mirror, and HTTPS_PROXY a proxy",
        reason=f"the hub cannot be reached ({why})",
    )


def _refused(repo_id: str, file: str, response: Any) -> HubError:
    status, what = response.status_code, f"{file} of {repo_id}" if file else repo_id
    if status in _BUSY:
        seconds = _asked_pause(response.headers)
        after = f", and asks to wait {seconds:.0f} s" if seconds else ""
        hint = "try again later: what was downloaded is kept"
        if status == 429 and not token():
            hint += "; with a token in HF_TOKEN it allows more"
        return HubError(f"the hub answers {status} for {what}{after}", hint=hint)
    if status == 404:
        return no_file(repo_id, file) if file else _no_model(repo_id)
    if status in (401, 403):
        problem = "does not accept your token in HF_TOKEN" if token() else "wants a token"
        return HubError(
            f"the hub {problem} for {what} ({status})",
            hint="set HF_TOKEN to a token that may read it",
        )
    return HubError(f"the hub answers {status} for {what}", hint="see the page of the model")


def try_again(work: Callable[[], Returned], what: str, report: Callable[[str], None]) -> Returned:
    """Do what asks the hub, again if that has too much to do."""
    from huggingface_hub import errors

    for pause in PAUSES:
        try:
            return work()
        except errors.HfHubHTTPError as error:
            seconds = pause_after(error, pause)
            if seconds is None:
                raise
            report(f"{what}: the hub answers {error.response.status_code}, again in {seconds:g} s")
            sleep(seconds)
    return work()


def pause_after(error: Exception, pause: float) -> float | None:
    """Return how long to wait before a request is sent again; None if that makes no sense."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        if error.response.status_code not in _BUSY:
            return None
        asked = _asked_pause(error.response.headers)
        return None if asked and asked > LONGEST_PAUSE else max(asked or 0.0, pause)
    return pause if isinstance(error, connection_errors()) else None


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which a hub wants to be asked again, if it says so."""
    if reset := _RESET.match(headers.get("ratelimit", "")):
        return float(reset[1])
    after = headers.get("retry-after", "").strip()
    if after.isascii() and after.isdigit():
        return float(after[:9])
    try:
        when = parsedate_to_datetime(after)
        now = datetime.now(timezone.utc) if when.tzinfo else datetime.now()
    except (TypeError, ValueError):
        return None
    return max(0.0, (when - now).total_seconds())


def connection_errors() -> tuple[type[Exception], ...]:
    """Return what the hub's client raises if a connection fails; before 1.0, an OSError."""
    # Which library it uses depends on its version.
    used = (sys.modules.get(name) for name in ("httpx2", "httpx"))
    return (OSError, *(module.HTTPError for module in used if module is not None))


def words(error: BaseException) -> str:
    """Return the first line of what an error says, without a token."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    found = token()
    return printable(lines[0].replace(found, "…") if found else lines[0])[:200]


def _endpoint() -> str:
    """Return the address of the hub, without what may be a password in it."""
    from huggingface_hub import constants

    return re.sub(r"//[^/@]*@", "//", printable(str(constants.ENDPOINT)))
