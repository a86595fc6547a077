"""Downloads files of one commit: several at a time, on from where a break was, one bar for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any

from llmserve.builder.hub.cache import Cache
from llmserve.builder.hub.failures import (
    PAUSES,
    HubError,
    connection_errors,
    pause_after,
    requesting,
    token,
    words,
)
from llmserve.builder.hub.listing import HubFile, Listing, with_content
from llmserve.builder.hub.unfinished import UnfinishedFile
from llmserve.builder.progress import Note, PartDone
from llmserve.errors import OutputError
from llmserve.texts import in_gb

Report = Callable[[str], None]

CONNECTIONS = 8
"""How many files are downloaded at a time, as the hub's client does."""
LONGEST_ANSWER = 20_000_000_000
"""The most bytes of one request: those who deliver the hub's files refuse answers of over 50 GB."""
_TICK = 0.25
_RATE_OVER = 10.0
"""The seconds that the rate is of."""
_SILENCE = 5.0
"""The seconds without a byte after which that is said."""
_WORTH_A_LINE = 2.0
"""The seconds of a pause that is said in a line of its own."""
_BLOCK = 1 << 16


def download(listing: Listing, names: Collection[str], report: Report) -> Path:
    """Download files of a commit, and return the folder of the commit.

    None has a name there before all are there; what was interrupted goes on the next time.
    """
    cache = Cache.of(listing.repo_id)
    snapshot = cache.snapshot(listing.commit)
    missing = [listing.files[name] for name in names if not (snapshot / name).exists()]
    if missing:
        with cache.locked(listing.repo_id, report):
            cache.link(listing, _complete(listing, missing, cache, report))
    cache.set_revision(listing)
    return snapshot


def content_of(listing: Listing, name: str, report: Report) -> Path:
    """Return where the content of a file is, which need not have a name there."""
    cache = Cache.of(listing.repo_id)
    pointer = cache.snapshot(listing.commit) / name
    if pointer.exists():
        return pointer
    with cache.locked(listing.repo_id, report):
        (found,) = _complete(listing, [listing.files[name]], cache, lambda _: None)
    return cache.content(found)


def _complete(
    listing: Listing, files: Sequence[HubFile], cache: Cache, report: Report
) -> list[HubFile]:
    """Download the contents that are not there, and return the files with the names of those."""
    found = [file if file.blob else with_content(listing, file) for file in files]
    missing = {file.blob: file for file in found if not cache.content(file).exists()}
    if missing:
        _Download(
            listing, [UnfinishedFile(file, cache) for file in missing.values()], cache, report
        ).run()
    return found


class _Download:
    """Several files on their way. Only the thread that runs this reports."""

    def __init__(
        self, listing: Listing, parts: Sequence[UnfinishedFile], cache: Cache, report: Report
    ) -> None:
        self._listing, self._parts, self._cache, self._report = listing, parts, cache, report
        self._waiting: SimpleQueue[UnfinishedFile] = SimpleQueue()
        # What is refused is refused with the first small file.
        for part in sorted(parts, key=lambda part: part.expected):
            self._waiting.put(part)
        self._stop, self._woken = Event(), Event()
        self._error: BaseException | None = None
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._rates = deque([(monotonic(), self._here)])
        self._moved = monotonic()

    @property
    def _here(self) -> int:
        return sum(part.size for part in self._parts)

    @property
    def _total(self) -> int:
        return sum(max(part.expected, part.size) for part in self._parts)

    def run(self) -> None:
        self._check_space()
        count = min(CONNECTIONS, len(self._parts))
        threads = [Thread(target=self._work, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            while self._error is None and any(thread.is_alive() for thread in threads):
                self._tell()
                self._woken.wait(_TICK)
                self._woken.clear()
        except KeyboardInterrupt:
            self._report(Note("what was downloaded is kept: the same command goes on from there"))
            raise
        finally:
            # Who waits for the hub notices late, but writes nothing any more.
            self._stop.set()
            until = monotonic() + 1
            for thread in threads:
                thread.join(max(0.0, until - monotonic()))
        self._tell()
        if self._error is not None:
            raise self._error

    def _check_space(self) -> None:
        needed, free = self._total - self._here, self._cache.free()
        if free is not None and needed > free:
            raise OutputError(
                f"{self._listing.repo_id} takes {in_gb(needed)} to download, and the disk of "
                f"{self._cache.folder.parent} has {in_gb(free)} free",
                hint="make some space, or name a folder on another disk in HF_HOME",
            )

    def _tell(self) -> None:
        with suppress(Empty):
            while True:
                self._report(Note(self._notes.get_nowait()))
        now, here, total = monotonic(), self._here, self._total
        if here != self._rates[-1][1]:
            self._moved = now
        self._rates.append((now, here))
        while now - self._rates[0][0] > _RATE_OVER:
            self._rates.popleft()
        since, before = self._rates[0]
        rate = max(0, here - before) / (now - since) if now > since else 0.0
        amount = f"{in_gb(here)} of {in_gb(total)}"
        if now - self._moved > _SILENCE:
            amount += f", nothing has come for {now - self._moved:.0f} s"
        elif rate:
            amount += f", {rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s"
        self._report(
            PartDone(
                f"downloading {self._listing.repo_id}",
                here / total if total else 1.0,
                amount=amount,
                left=(total - here) / rate if rate else None,
            )
        )

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                part = self._waiting.get_nowait()
                with requesting(self._listing.repo_id, self._listing.revision, part.file.name):
                    self._load(part)
        except Empty:
            pass
        except BaseException as error:
            # The thread that waits raises it again.
            self._error = self._error or error
        finally:
            self._woken.set()

    def _load(self, part: UnfinishedFile) -> None:
        is_fresh = not part.size
        with part.opened(self._stop.is_set):
            while not self._stop.is_set():
                self._fill(part)
                if self._stop.is_set():
                    return
                if part.is_right():
                    part.finish()
                    return
                part.restart()
                if is_fresh:
                    raise HubError(
                        f"{part.file.name} of {self._listing.repo_id} is not what the hub says it "
                        "is: it has another hash",
                        hint="try again; a proxy or a mirror may have changed it",
                    )
                is_fresh = True
                self._notes.put(f"{part.file.name} is downloaded anew: what was here is not of it")

    def _fill(self, part: UnfinishedFile) -> None:
        """Ask for the rest until it is there: again if a connection breaks, or the hub is busy."""
        failures, most = 0, part.size
        while not self._stop.is_set():
            try:
                if self._request(part):
                    return
                failures = 0
            except connection_errors() as error:
                # One that begins anew again and again makes no progress.
                failures = 0 if part.size > most else failures
                most = max(most, part.size)
                left = PAUSES[failures:]
                pause = pause_after(error, left[0]) if left else None
                if pause is None:
                    raise self._broken(error) from None
                failures += 1
                if pause >= _WORTH_A_LINE:
                    self._notes.put(f"{part.file.name}: {words(error)}; again in {pause:g} s")
                self._stop.wait(pause)

    def _broken(self, error: Exception) -> Exception:
        from huggingface_hub.errors import HfHubHTTPError

        is_refusal: bool = isinstance(error, HfHubHTTPError)
        if is_refusal:
            # It is told apart by its status.
            return error
        return HubError(
            f"{self._listing.repo_id} could not be downloaded: {words(error)}",
            hint=f"the same command goes on from what is here, {in_gb(self._here)} of "
            f"{in_gb(self._total)}",
        )

    def _request(self, part: UnfinishedFile) -> bool:
        """Ask for the rest of a file, or a long piece of it, and return whether all is there."""
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        start, size = part.size, part.file.size
        if size is not None and start >= size:
            return True
        end = None if size is None else min(size, start + LONGEST_ANSWER)
        headers = {**build_hf_headers(token=token()), "Accept-Encoding": "identity"}
        if start or end != size:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with _answer(_url(self._listing, part.file), headers) as (response, blocks):
            if response.status_code == _NO_SUCH_RANGE:
                part.restart()
                raise ConnectionError("the hub has less of it than is here")
            hf_raise_for_status(response)
            if start and not _begins_at(response, start):
                part.restart()
            for block in blocks:
                if self._stop.is_set():
                    return False
                part.write(block)
        if end is not None and part.size < end:
            raise ConnectionError(f"the hub ended it after {part.size} bytes of {size}")
        return size is None or part.size == size


_NO_SUCH_RANGE = 416
_PARTIAL = 206


def _begins_at(response: Any, start: int) -> bool:
    """Return whether an answer goes on from there: a hub may send the whole nevertheless."""
    is_plain = response.headers.get("content-encoding", "identity") == "identity"
    said = str(response.headers.get("content-range", "")).replace("=", " ")
    return response.status_code == _PARTIAL and is_plain and said.startswith(f"bytes {start}-")


@contextmanager
def _answer(url: str, headers: Mapping[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """Ask with the session of the hub's client, which knows of proxies and certificates."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    session, timeout = get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
    if callable(getattr(session, "stream", None)):
        with session.stream(
            "GET", url, headers=headers, timeout=timeout, follow_redirects=True
        ) as answer:
            yield answer, answer.iter_bytes()
    else:
        # Before 1.0 it uses requests, which loses a block if a connection breaks.
        try:
            found = session.get(url, headers=headers, timeout=timeout, stream=True)
        except ValueError as error:
            raise ConnectionError(f"it leads to no address: {words(error)}") from None
        with found as answer:
            yield answer, answer.iter_content(_BLOCK)


def _url(listing: Listing, file: HubFile) -> str:
    from huggingface_hub import hf_hub_url

    return str(hf_hub_url(listing.repo_id, file.name, revision=listing.commit))
