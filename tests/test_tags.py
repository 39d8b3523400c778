"""Directories with a valid CACHEDIR.TAG are caches, if the rule file says so."""

import os
import pathlib
from collections.abc import Iterator

import pytest
from mounting import Mount

SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
TAGGED = "[options]\ncachedir_tag = true\n"


@pytest.fixture
def tagging(tmp_path: pathlib.Path) -> Iterator[Mount]:
    with Mount(tmp_path / "mount", tmp_path / "state", TAGGED) as mounted:
        yield mounted


def class_of(path: pathlib.Path) -> str:
    return os.getxattr(path, "user.deltapool.class").decode()


def make(root: pathlib.Path) -> pathlib.Path:
    (root / "target" / "deep").mkdir(parents=True)
    file = root / "target" / "deep" / "object.o"
    file.write_bytes(b"x")
    return file


def test_a_tag_makes_a_cache_of_what_is_there_and_of_what_comes(tagging: Mount) -> None:
    file = make(tagging.path)
    assert class_of(file) == "work"
    (tagging.path / "target" / "CACHEDIR.TAG").write_bytes(SIGNATURE + b"\n# made by a build\n")
    (file.parent / "later.o").write_bytes(b"y")
    assert class_of(file) == class_of(file.parent / "later.o") == "cache"
    tagging.remount()
    assert class_of(file) == "cache"
    assert tagging.status()["cache"]["files"] == 3


def test_without_its_tag_a_cache_is_work_again(tagging: Mount) -> None:
    file = make(tagging.path)
    tag = tagging.path / "target" / "CACHEDIR.TAG"
    tag.write_bytes(SIGNATURE)
    tag.rename(tagging.path / "target" / "elsewhere")
    assert class_of(file) == "work"
    (tagging.path / "target" / "elsewhere").rename(tag)
    assert class_of(file) == "cache"
    tag.unlink()
    assert class_of(file) == "work"


def test_what_moves_out_of_a_tagged_directory_is_work_again(tagging: Mount) -> None:
    file = make(tagging.path)
    (tagging.path / "target" / "CACHEDIR.TAG").write_bytes(SIGNATURE)
    file.parent.rename(tagging.path / "kept")
    assert class_of(tagging.path / "kept" / "object.o") == "work"


@pytest.mark.parametrize("content", [b"", SIGNATURE[:-1], b"signature: 8a477f597d28d172789f06886806bc55"])
def test_a_tag_without_the_signature_says_nothing(tagging: Mount, content: bytes) -> None:
    file = make(tagging.path)
    (tagging.path / "target" / "CACHEDIR.TAG").write_bytes(content)
    assert class_of(file) == "work"


def test_a_tag_in_the_root_does_not_make_a_cache_of_the_volume(tagging: Mount) -> None:
    file = make(tagging.path)
    (tagging.path / "CACHEDIR.TAG").write_bytes(SIGNATURE)
    assert class_of(file) == "work"


def test_tags_say_nothing_unless_the_rule_file_asks(mount: Mount) -> None:
    file = make(mount.path)
    (mount.path / "target" / "CACHEDIR.TAG").write_bytes(SIGNATURE)
    assert class_of(file) == "work"
