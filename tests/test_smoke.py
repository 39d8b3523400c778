"""The shortest way through everything: mount, write, read, remount."""

from mounting import Mount


def test_a_file_survives_a_remount(mount: Mount) -> None:
    (mount.path / "a").write_text("hello")
    mount.remount()
    assert (mount.path / "a").read_text() == "hello"
    assert mount.status()["recovery"]["clean"]
