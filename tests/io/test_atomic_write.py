"""`atomic_write` keeps permissions and links, and leaves nothing behind when it fails."""

import os
import stat
from pathlib import Path

import pytest

from winnowgp.errors import InputError
from winnowgp.io.format import atomic_write

pytestmark = pytest.mark.skipif(os.name == "nt", reason="permissions and links of POSIX")


def write(path: Path, content: str = "new") -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_atomic_write_of_a_new_file_obeys_the_umask(
    tmp_path: Path, umask: int, expected: int
) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "a")
        (tmp_path / "b").write_text("plain")
        assert mode(tmp_path / "a") == mode(tmp_path / "b") == expected
        # The umask is unchanged.
        assert os.umask(umask) == umask
    finally:
        os.umask(before)


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_atomic_write_keeps_the_permissions_of_the_old_file(
    tmp_path: Path, permissions: int
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(permissions)
    write(path)
    assert (path.read_text(), mode(path)) == ("new", permissions)


def test_atomic_write_is_private_until_complete(tmp_path: Path) -> None:
    (tmp_path / "a").touch(mode=0o644)
    with atomic_write(tmp_path / "a") as temporary:
        assert mode(temporary) == 0o600


@pytest.mark.parametrize("there", [True, False], ids=["file", "nothing yet"])
def test_atomic_write_replaces_the_target_of_a_link(tmp_path: Path, there: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target, between, link = elsewhere / "model", tmp_path / "between", tmp_path / "link"
    if there:
        target.write_text("old")
        target.chmod(0o640)
    between.symlink_to("elsewhere/model")
    link.symlink_to(between)
    write(link)
    assert link.readlink() == between
    assert between.is_symlink()
    assert (target.read_text(), target.is_symlink()) == ("new", False)
    assert not there or mode(target) == 0o640
    # Nothing else is left in either folder.
    assert [path.name for path in elsewhere.iterdir()] == ["model"]
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "between", "link"}


def test_atomic_write_on_failure_leaves_link_and_target(tmp_path: Path) -> None:
    target, link = tmp_path / "model", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)

    def interrupted() -> None:
        with atomic_write(link) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (link.readlink(), target.read_text()) == (target, "old")
    assert len(list(tmp_path.iterdir())) == 2


def test_atomic_write_to_an_open_pipe_is_refused(tmp_path: Path) -> None:
    """/dev/stdout may be a pipe, whose real path does not exist."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(InputError, match="not a regular file"):
            write(Path(f"/dev/fd/{writing}"))
    finally:
        os.close(reading)
        os.close(writing)


def test_atomic_write_to_a_dangling_link_is_refused(tmp_path: Path) -> None:
    circle, lost, device = tmp_path / "circle", tmp_path / "lost", tmp_path / "device"
    circle.symlink_to("circle")
    lost.symlink_to(tmp_path / "no folder" / "model")
    device.symlink_to("/dev/null")
    for link, named in [
        (circle, "circle is not a regular file"),
        (lost, "lost links to .*no folder/model, whose folder does not exist"),
        (device, "device is not a regular file"),
    ]:
        with pytest.raises(InputError, match=named):
            write(link)
        assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 3
