"""Files are there whole or not at all, and for whom the user's umask lets them be."""

import os

import pytest

from jaxgpt.paths import write_whole


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_who_may_read_is_the_umask_s_to_say(tmp_path, umask, mask, mode):
    """A group that shares its runs reads each other's pages; someone who wants none of that says so once."""
    umask(mask)
    write_whole(tmp_path / "page.html", "é\r\n")
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == mode
    assert (tmp_path / "page.html").read_bytes() == b"\xc3\xa9\r\n"


def test_what_cannot_be_written_leaves_what_was(tmp_path):
    write_whole(tmp_path / "page.html", "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "page.html", "a" * 100_000 + "\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"
