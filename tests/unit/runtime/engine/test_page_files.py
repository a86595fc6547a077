"""Pages on disk: what is read is what was written, or nothing; and they take a limited space."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.runtime.engine.page_files import PageFiles, PageFolderError

LIMIT = 1_000_000

contents = st.binary(min_size=1, max_size=9000)


def name_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def taken(folder: Path) -> int:
    """Return how much space the pages take, as the file system has it."""
    found = 0
    for path in folder.iterdir():
        try:
            found += -(-path.stat().st_size // 4096) * 4096 if path.name != "lock" else 0
        except FileNotFoundError:
            continue
    return found


def write(files: PageFiles, number: int, content: bytes = b"content") -> bool:
    return files.write(name_of(number), content, label="model", tokens=32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "pages"


@pytest.fixture
def files(folder: Path) -> Iterator[PageFiles]:
    files = PageFiles(folder, LIMIT)
    yield files
    files.close()


@settings(max_examples=40, deadline=None)
@given(pages=st.dictionaries(st.integers(), contents, max_size=12))
def test_what_was_written_is_read(pages: dict[int, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = PageFiles(Path(folder), LIMIT)
        for number, content in pages.items():
            assert write(files, number, content)
        other = PageFiles(Path(folder), LIMIT)
        assert {number: other.read(name_of(number)) for number in pages} == pages
        assert other.read(name_of(max(pages, default=0) + 1)) is None
        assert len(other.pages()) == len(pages)
        assert other.clear("another model") == 0
        assert other.clear("model") == len(pages)
        assert not other.pages()


@settings(max_examples=200, deadline=None)
@given(content=contents, data=st.data())
def test_a_page_that_was_changed_anywhere_is_not_believed(
    content: bytes, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = PageFiles(Path(folder), LIMIT)
        write(files, 1, content)
        path = Path(folder, name_of(1).hex())
        written = bytearray(path.read_bytes())
        if data.draw(st.booleans(), label="is cut"):
            del written[data.draw(st.integers(0, len(written) - 1), label="length") :]
        else:
            at = data.draw(st.integers(0, 8 * len(written) - 1), label="bit")
            written[at // 8] ^= 1 << at % 8
        path.write_bytes(written)
        assert files.read(name_of(1)) is None
        assert not path.exists()
        assert write(files, 1, content)
        assert files.read(name_of(1)) == content


def test_a_page_under_the_name_of_another_is_not_believed(files: PageFiles, folder: Path) -> None:
    write(files, 1)
    (folder / name_of(1).hex()).rename(folder / name_of(2).hex())
    assert files.read(name_of(2)) is None


def test_what_is_no_file_is_not_read(files: PageFiles, folder: Path, tmp_path: Path) -> None:
    write(files, 1)
    (folder / name_of(1).hex()).rename(tmp_path / "elsewhere")
    (folder / name_of(1).hex()).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / name_of(2).hex())
    assert files.read(name_of(1)) is None
    assert files.read(name_of(2)) is None


def test_nobody_else_can_read_pages(files: PageFiles, folder: Path) -> None:
    write(files, 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_folder_that_others_can_read_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (opened := tmp_path / "opened").mkdir(mode=0o755)
    (own := tmp_path / "own").mkdir(mode=0o700)
    (link := tmp_path / "link").symlink_to(own)
    (file := tmp_path / "file").touch()
    for folder, problem in (
        (opened, "can be read by other users"),
        (link, "is a link"),
        (file, "cannot be opened"),
    ):
        with pytest.raises(PageFolderError, match=problem):
            PageFiles(folder, LIMIT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    os.chown(folder, 12345, 12345)
    with pytest.raises(PageFolderError, match="belongs to another user"):
        PageFiles(folder, LIMIT)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60_000), min_size=1, max_size=40),
    used=st.lists(st.integers(0, 39), max_size=20),
    limit=st.integers(1, 40),
)
def test_the_limit_is_held(sizes: list[int], used: list[int], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = PageFiles(Path(folder), limit * 4096)
        for number, size in enumerate(sizes):
            is_there = write(files, number, bytes(size))
            assert is_there == (-(-(size + 120) // 4096) <= limit)
            assert taken(Path(folder)) <= limit * 4096
            if is_there:
                assert files.read(name_of(number)) == bytes(size)
            if number < len(used):
                files.touch([name_of(used[number])])


def test_what_was_used_last_stays_and_the_end_of_a_text_goes_first(folder: Path) -> None:
    files = PageFiles(folder, 10 * 4096)
    for number in range(10):
        write(files, number)
    assert files.touch([name_of(number) for number in range(8)]) == []
    for number in range(20, 24):
        write(files, number)
        files.touch([name_of(number)])
    kept = [number for number in range(30) if files.read(name_of(number)) is not None]
    assert kept == [0, 1, 2, 3, 4, 5, 20, 21, 22, 23]
    assert files.touch([name_of(4), name_of(9)]) == [name_of(9)]


def test_what_is_kept_longer_outlives_others_and_takes_no_more_than_half(folder: Path) -> None:
    files = PageFiles(folder, 40 * 4096)

    def text(first: int, *, longer: bool = False) -> list[bytes]:
        names = [name_of(number) for number in range(first, first + 4)]
        for number in range(first, first + 4):
            assert write(files, number)
            assert taken(folder) <= 40 * 4096
        assert files.touch(names, longer=longer) == []
        return names

    def is_there(names: list[bytes]) -> bool:
        return None not in map(files.read, names)

    session, other = text(0, longer=True), text(10)
    for first in range(100, 500, 4):
        text(first)
    assert is_there(session)
    assert not is_there(other)
    # A mark is in the folder: another process knows it, and nobody else can read the page.
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o600, 0o400}
    files = PageFiles(folder, 40 * 4096)
    others = [text(first) for first in range(500, 512, 4)]
    for first in range(1000, 1400, 4):
        text(first, longer=True)
    assert all(map(is_there, others))
    assert not is_there(session)
    last = [text(first, longer=True) for first in range(1400, 1416, 4)]
    assert all(map(is_there, last))


def test_what_is_kept_longer_goes_too_when_nobody_used_it_for_long(folder: Path) -> None:
    files = PageFiles(folder, 4 * 4096, most_seconds=60)
    for number in range(4):
        write(files, number)
    files.touch([name_of(1)], longer=True)
    old = time.time() - 61
    os.utime(folder / name_of(1).hex(), (old, old))
    assert files.read(name_of(1)) is None
    write(files, 5)
    assert not (folder / name_of(1).hex()).exists()
    assert files.read(name_of(3)) is not None


def test_a_page_that_is_not_to_be_marked_is_kept_as_others_are(
    files: PageFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no modes here")

    write(files, 1)
    monkeypatch.setattr(os, "fchmod", refuse)
    assert files.touch([name_of(1)], longer=True) == []
    assert files.read(name_of(1)) == b"content"


def test_a_page_that_nobody_used_for_long_goes(folder: Path) -> None:
    files = PageFiles(folder, LIMIT, most_seconds=60)
    write(files, 1)
    write(files, 2)
    old = time.time() - 61
    os.utime(folder / name_of(1).hex(), (old, old))
    assert files.read(name_of(1)) is None
    assert files.read(name_of(2)) is not None
    (folder / "lock").write_bytes(b"")
    write(files, 3)
    assert not (folder / name_of(1).hex()).exists()


def test_what_a_killed_writer_left_is_removed(files: PageFiles, folder: Path) -> None:
    write(files, 1)
    unfinished = folder / f"{name_of(2).hex()}.new"
    unfinished.write_bytes(bytes(900_000))
    os.utime(unfinished, (0, 0))
    write(files, 3, bytes(600_000))
    write(files, 4, bytes(600_000))
    assert not unfinished.exists()
    assert files.read(name_of(4)) is not None


_WRITE = """
import hashlib, resource, sys
from pathlib import Path
from llmserve.runtime.engine.page_files import PageFiles
files = PageFiles(Path(sys.argv[1]), 1_000_000)
def name_of(number):
    return hashlib.sha256(str(number).encode()).digest()
"""


def test_a_disk_that_refuses_a_page_leaves_no_part_of_it(files: PageFiles, folder: Path) -> None:
    write(files, 1)
    program = f"""{_WRITE}
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    files.write(name_of(2), bytes(100_000), label="m", tokens=1)
except OSError:
    print("refused")
files.write(name_of(3), bytes(4000), label="m", tokens=1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n"
    names = {path.name for path in folder.iterdir()}
    assert names == {"lock", name_of(1).hex(), name_of(3).hex()}
    assert files.read(name_of(3)) == bytes(4000)


def test_two_writers_share_a_folder_and_its_limit(files: PageFiles, folder: Path) -> None:
    program = f"""{_WRITE}
for number in range(int(sys.argv[2]), 600):
    content = str(number).encode() * 4000
    files.write(name_of(number), content, label="m", tokens=1)
    for other in range(max(0, number - 9), number + 9):
        assert files.read(name_of(other)) in (None, str(other).encode() * 4000)
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(folder), first])
        for first in ("0", "300")
    ]
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, taken(folder))
        time.sleep(0.002)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert 500_000 < most <= LIMIT
    assert files.read(name_of(599)) == b"599" * 4000


_MANY = 100_000_000

_LOAD = f"""
import hashlib, random, sys, threading
from pathlib import Path
from llmserve.runtime.engine.page_files import PageFiles
files = PageFiles(Path(sys.argv[1]), {_MANY})
def name_of(number):
    return hashlib.sha256(str(number).encode()).digest()
def content_of(number):
    return number.to_bytes(8, "little") * (10_000 + number % 7 * 10_000)
wrong = []
def work(seed):
    chance = random.Random(seed)
    for _ in range(80):
        first = chance.randrange(1000)
        names = []
        for number in range(first, first + 4):
            if files.read(name_of(number)) not in (None, content_of(number)):
                wrong.append(number)
            files.write(name_of(number), content_of(number), label="m", tokens=1)
            names.append(name_of(number))
        files.touch(names, longer=first < 300)
threads = [threading.Thread(target=work, args=(f"{{sys.argv[2]}} {{n}}",)) for n in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(bool(wrong))
"""


def test_many_writers_hold_a_limit_of_100_mb_and_a_killed_one_changes_nothing(
    folder: Path,
) -> None:
    command = [sys.executable, "-c", _LOAD, str(folder)]
    writers = [subprocess.Popen([*command, str(seed)]) for seed in range(4)]
    looks = []
    while any(writer.poll() is None for writer in writers):
        looks.append(taken(folder) if folder.exists() else 0)
        if looks[-1] > _MANY // 2:
            writers[0].kill()
        time.sleep(0.002)
    assert [writer.wait() for writer in writers] == [-signal.SIGKILL, 0, 0, 0]
    assert 0.8 * _MANY < max(looks) <= _MANY
    files = PageFiles(folder, _MANY)
    kept = [number for number in range(1003) if files.read(name_of(number)) is not None]
    assert len(kept) > 100
    assert all(
        files.read(name_of(number)) == number.to_bytes(8, "little") * (10_000 + number % 7 * 10_000)
        for number in kept
    )
