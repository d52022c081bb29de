"""The registry: what is downloaded, checked, refused, kept."""

import hashlib

import pytest

from jaxgpt.data import corpus as module
from jaxgpt.data.corpus import CORPORA, Corpus, find_corpus_files, find_user_files, read_text, strip_gutenberg
from jaxgpt.errors import UserError
from jaxgpt.files import sha256

TEXT = "Desocupado lector: ñandú.\n"
SHA256 = hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.fixture
def lector(tmp_path, monkeypatch):
    """Register a corpus at an address, by default of a file with TEXT, and return that file."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    (served := tmp_path / "served.txt").write_text(TEXT, encoding="utf-8")

    def register(url=None, sha256=SHA256):
        monkeypatch.setitem(CORPORA, "lector", Corpus(url=url or served.as_uri(), sha256=sha256))
        return served

    return register


def test_downloaded_once_then_kept(lector):
    served = lector()
    for _ in range(2):
        (path,) = find_corpus_files("lector")
        assert path.read_text(encoding="utf-8") == TEXT
        served.unlink(missing_ok=True)
    path.write_text("something else")
    with pytest.raises(UserError, match=r"is not the corpus 'lector': .* Delete it to download it again"):
        find_corpus_files("lector")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"url": "file:///nowhere"}, "could not download lector"),
        ({"url": "http://127.0.0.1:9/good"}, "could not download lector"),
        ({"sha256": "0" * 64}, "has SHA-256"),
    ],
)
def test_what_fails_is_told_and_leaves_nothing(lector, tmp_path, where, said):
    """What is cut short has another SHA-256, too."""
    lector(**where)
    path = tmp_path / "corpora" / "lector.txt"
    with pytest.raises(UserError, match=rf"({said}).*To give it by hand, save the text as {path}"):
        find_corpus_files("lector")
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("name", ["shakespeare", "sancho", "quijote"])
def test_registered_hashes_are_those_of_the_real_texts(real_text, name):
    assert hashlib.sha256((real_text / f"{name}.txt").read_bytes()).hexdigest() == CORPORA[name].sha256


def test_pythons_documentation_is_the_same_with_every_python():
    (path,) = find_corpus_files("python-docs")
    assert sha256(path) == "090a08ffd73149fc0ff4ed39e380ead54565559f23d7e8535408e567b1904200"


def test_gutenberg_frame_is_removed():
    framed = "\ufeffThe Project Gutenberg eBook\r\n*** START OF THE PROJECT ***\r\n\r\nEn un lugar\r\nde la Mancha\r\n\r\n*** END OF THE PROJECT ***\r\nlicence\r\n"
    assert strip_gutenberg(framed) == "En un lugar\nde la Mancha"


def test_a_folder_is_its_text_files_by_name(tmp_path):
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("A")
    (tmp_path / "c.md").write_text("C")
    files = find_user_files(str(tmp_path))
    assert [f.name for f in files] == ["b.txt", "a.txt"]
    assert ["".join(read_text(file)) for file in files] == ["B", "A"]


def test_text_is_read_in_pieces_and_characters_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    path = tmp_path / "t.txt"
    path.write_text("ñandú — sí", encoding="utf-8")
    pieces = list(read_text(path))
    assert len(pieces) > 3 and "".join(pieces) == "ñandú — sí"
