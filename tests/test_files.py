"""Files are there whole or not at all, and for whom the user's umask lets them be."""

import os

import pytest

from jaxgpt.errors import UserError
from jaxgpt.files import new_file, open_whole, write_whole
from jaxgpt.tools.html_page import Arrays, render_html


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_is_the_umask_s_to_say(tmp_path, mask, mode):
    """A group that shares its runs reads each other's pages; someone who wants none of that says so once."""
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "page.html", "é\r\n")
    finally:
        os.umask(before)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == mode
    assert (tmp_path / "page.html").read_bytes() == b"\xc3\xa9\r\n"


def test_what_is_written_is_there_whole_or_not_at_all(tmp_path):
    with open_whole(tmp_path / "image.png") as f:
        f.write(b"\x89PNG")
        assert not (tmp_path / "image.png").exists()
        f.write(b"\r\n")
    with pytest.raises(KeyboardInterrupt), open_whole(tmp_path / "image.png") as f:
        f.write(b"half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["image.png"]
    assert (tmp_path / "image.png").read_bytes() == b"\x89PNG\r\n"


def test_only_our_own_pages_are_replaced_unasked(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render_html(["report"], {"title": "ours"}, Arrays()))
    assert new_file(str(path), force=False) == path
    path.write_text('<!doctype html>\n<html lang="en">\n<title>mine</title>')
    with pytest.raises(UserError, match="page.html exists: name another with --out, or overwrite it with --force"):
        new_file(str(path), force=False)
    assert new_file(str(path), force=True) == path
