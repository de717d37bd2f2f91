"""Files of lines on a disk that fills up, and is taken away."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.runtime.files import LogFile, read_lines
from tests.support.disks import files_of_at_most


class Failures(list[tuple[Path, int]]):
    def __call__(self, path: Path, error: OSError) -> None:
        self.append((path, error.errno))


pieces = st.lists(st.binary(min_size=1, max_size=60).map(lambda text: text.replace(b"\n", b" ") + b"\n"), max_size=8)


@given(before=pieces, during=pieces, after=pieces, room=st.integers(0, 300))
def test_nothing_is_lost_or_cut_on_a_disk_that_was_full(
    before: list[bytes], during: list[bytes], after: list[bytes], room: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, failures = tmp_path_factory.mktemp("disk") / "log", Failures()
    file = LogFile(path, failures)
    for piece in before:
        file.append(piece)
    written = b"".join(before)
    with files_of_at_most(max(room, len(written))):
        for at, piece in enumerate(during, start=1):
            file.append(piece)
            whole = b"".join([*before, *during[: at - file.waiting]])
            assert path.read_bytes() == whole
    assert set(failures) <= {(path, errno.EFBIG)}
    assert bool(failures) == (len(b"".join([*before, *during])) > max(room, len(written)))
    for piece in after:
        file.append(piece)
    file.flush()
    assert file.waiting == 0
    assert (path.read_bytes() if path.exists() else b"") == b"".join([*before, *during, *after])


def test_a_full_device_is_told_each_time(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    failures = Failures()
    file = LogFile(tmp_path / "log", failures)
    file.append(b"one\n")
    file.append(b"two\n")
    assert failures == [(tmp_path / "log", errno.ENOSPC)] * 2
    assert file.waiting == 2


@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"))), rest=st.binary(max_size=5))
def test_lines_are_read_as_json_lines_are_meant(
    lines: list[str], rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rest = rest.replace(b"\n", b"")
    path = tmp_path_factory.mktemp("lines") / "log"
    path.write_bytes("".join(line + "\n" for line in lines).encode() + rest)
    assert read_lines(path) == (lines, bool(rest))


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\nt\xffo\n")
    with pytest.raises(ValueError, match=r"log:2: not UTF-8 text \(byte 1 of the line\); remove the line"):
        read_lines(tmp_path / "log")
