import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tokenizer.errors import ConfigError, DatasetError, OutputError
from tokenizer.files import file_sha256, make_folder, read_json, replacing, write_json

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT


@given(content=st.dictionaries(TEXT, SCALARS | st.lists(SCALARS)))
def test_json_comes_back_as_it_was_written(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("json") / "new" / "a.json"
    write_json(path, content)
    assert read_json(path, DatasetError) == content
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n "a": 1,\n "b" 2\n}', ["line 3", "expected JSON"]),
        (b"[1]", ["a JSON object", "[1]"]),
        (b'{"a": "\xff"}', ["line 1", "UTF-8", "0xff"]),
        (None, ["expected a thing", "No such file"]),
    ],
)
@pytest.mark.parametrize("error_class", [ConfigError, DatasetError])
def test_bad_json_is_one_line_of_the_error_asked_for(tmp_path, content, words, error_class):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error_class) as caught:
        read_json(path, error_class, "a thing")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [str(path), *words])


def test_after_a_failure_the_old_file_stands_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail_half_way():
        with replacing(path) as temporary:
            temporary.write_text("new")
            assert path.read_text() == "old"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    with pytest.raises(OutputError, match=r"a\.txt: expected a writable file, got: No space"), replacing(path):
        raise OSError(28, "No space left on device")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.txt": "old"}


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with replacing(path) as one, replacing(path) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"


def test_a_file_in_the_way_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="expected a writable file"):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(OutputError, match="expected a writable file"):
        write_json(tmp_path / "file" / "below" / "a.json", {})


def test_hashes_are_of_the_bytes(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1.
    assert file_sha256(path, DatasetError) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(ConfigError, match="expected a readable file"):
        file_sha256(tmp_path, ConfigError)


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, kind: str):
    path = tmp_path / "metrics.json"
    os.mkfifo(path) if kind == "FIFO" else path.mkdir()
    mode = path.lstat().st_mode
    with pytest.raises(OutputError, match=f"metrics.json: expected a file or none, got a {kind}"):
        write_json(path, {})
    assert path.lstat().st_mode == mode
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.json"]
