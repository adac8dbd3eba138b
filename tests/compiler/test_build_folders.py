"""Where libraries are kept: in folders that none but this user and root can change."""

from __future__ import annotations

import errno
import os
import re
import warnings
from pathlib import Path

import pytest
from compiler.build_cases import (
    GXX,
    STRANGER,
    as_another_user,
    built_elsewhere,
    give_away,
    in_child,
    python,
    runs,
    script,
    text,
)

from fusedrnn._compiler import build as building
from fusedrnn._compiler import library_cache
from fusedrnn._compiler.build import CannotBuild, build

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

Patch = pytest.MonkeyPatch


def test_the_folder(tmp_path: Path, folder: Path, monkeypatch: Patch) -> None:
    assert library_cache.wanted_folder() == folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FUSEDRNN_CACHE", "~/mine")
    assert library_cache.wanted_folder() == tmp_path / "home/mine"
    monkeypatch.setenv("FUSEDRNN_CACHE", "here/../there")
    assert library_cache.wanted_folder() == tmp_path / "there"
    monkeypatch.setenv("FUSEDRNN_CACHE", "")
    assert library_cache.wanted_folder() == tmp_path / "home/.cache/fusedrnn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert library_cache.wanted_folder() == tmp_path / "home/.cache/fusedrnn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library_cache.wanted_folder() == tmp_path / "xdg/fusedrnn"


def test_folders_are_made_for_this_user_alone(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FUSEDRNN_CACHE", str(folder / "a/b"))
    before = os.umask(0)
    try:
        library = build(text())
    finally:
        os.umask(before)
    assert library.path.parent == folder / "a/b"
    for made in (folder, folder / "a", folder / "a/b"):
        assert made.stat().st_mode & 0o7777 == 0o700
    assert library.path.stat().st_mode & 0o7777 == 0o644


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_others_can_write_to_the_folder(folder: Path, mode: int) -> None:
    """The library that is there is not loaded."""
    folder.mkdir(mode=0o700)
    if mode == 0o770:
        give_away(folder, group=True)
    in_child(lambda: build(text()))
    folder.chmod(mode)
    in_child(lambda: built_elsewhere(f"other users can write to {folder}"))
    folder.chmod(0o755)
    assert build(text()).is_cached


def test_a_group_of_one_user_is_no_other_user(folder: Path, monkeypatch: Patch) -> None:
    folder.mkdir()
    folder.chmod(0o775)
    if not library_cache._is_own_group(folder.stat().st_gid):
        pytest.skip("this user has no group of the same name")
    assert build(text()).path.parent == folder
    user = library_cache.pwd.getpwuid(os.geteuid())
    shared = library_cache.grp.struct_group((user.pw_name, "x", user.pw_gid, ["somebody"]))
    monkeypatch.setattr(library_cache.grp, "getgrgid", lambda group: shared)
    assert not library_cache._is_own_group(user.pw_gid)


def test_others_can_exchange_the_folder(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    way = tmp_path / "way"
    way.mkdir()
    monkeypatch.setenv("FUSEDRNN_CACHE", str(way / "cache"))
    way.chmod(0o777)
    built_elsewhere(f"other users can write to {way}")
    assert not list(way.iterdir())
    way.chmod(0o1777)  # as /tmp is: others cannot rename what is not theirs
    assert build(text("in a sticky folder")).path.parent == way / "cache"


def test_a_folder_of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    give_away(folder)
    built_elsewhere(rf"{folder} belongs to another user \(uid {STRANGER}\)")


def test_symbolic_links(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "way").mkdir()
    folder.symlink_to("way/../link")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert build(text()).path.parent == tmp_path / "real"

    (tmp_path / "real").chmod(0o777)
    in_child(lambda: built_elsewhere("can write to .*/real", "open"))
    (tmp_path / "link").unlink()
    in_child(lambda: built_elsewhere("No such file or directory", "gone"))
    (tmp_path / "link").symlink_to(folder)
    in_child(lambda: built_elsewhere("too many symbolic links", "loop"))
    (tmp_path / "link").unlink()
    (tmp_path / "link").write_text("")
    in_child(lambda: built_elsewhere("link is not a folder", "file"))


def test_a_link_of_another_user(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    give_away(folder)
    built_elsewhere(f"{folder} belongs to another user")


def test_a_folder_that_cannot_be_made(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FUSEDRNN_CACHE", "/proc/fusedrnn")  # where root cannot write either
    library = built_elsewhere(r"/proc/fusedrnn cannot be used \(No such file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        another = build(text("another"))  # is built in the same folder, and says nothing
    assert another.path.parent == library.path.parent


def test_a_home_that_is_read_only(folder: Path, readable: Path) -> None:
    (readable / "home").mkdir(mode=0o555)
    (readable / "temporary").mkdir()
    (readable / "temporary").chmod(0o1777)

    def use() -> None:
        os.environ.update(HOME=str(readable / "home"), FUSEDRNN_CACHE="")
        library_cache.tempfile.tempdir = str(readable / "temporary")
        built_elsewhere("Permission denied")

    as_another_user(use)


@pytest.mark.slow
def test_the_folder_of_a_process_goes_with_it(folder: Path) -> None:
    code = """
import os
folder = build(text()).path.parent
if os.fork() == 0:
    import sys
    sys.exit()  # removes nothing of its parent's
os.wait()
print(folder, folder.exists())
if os.fork() == 0:
    print(build(text("another")).path.parent == folder, flush=True)  # it has its own
    import sys
    sys.exit()
os.wait()
"""
    done = python(code, FUSEDRNN_CACHE="/proc/fusedrnn", TMPDIR=str(folder.parent))
    first, second = done.stdout.splitlines()
    path, existed = first.split()
    assert existed == "True" and second == "False", done.stderr
    assert not list(folder.parent.glob("fusedrnn-*"))
    assert Path(path).parent == folder.parent


def test_no_folder_at_all(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(library_cache.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CannotBuild, match=r"the library cannot be stored: .*there is no temporary"):
        build(text())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk(folder: Path, monkeypatch: Patch, number: int) -> None:
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if Path(target).parent == folder:
            raise OSError(number, os.strerror(number))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    built_elsewhere(re.escape(os.strerror(number)))
    assert not list(folder.iterdir())


def test_a_compiler_on_a_full_disk(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Its words do not matter if no space is left; it may be unable to write them."""
    assert GXX is not None
    compiler = script(tmp_path / "script", f'case $TMPDIR in {folder}/*) exit 1; esac; {GXX} "$@"')
    monkeypatch.setenv("CXX", compiler)
    usage = building.shutil.disk_usage
    monkeypatch.setattr(
        building.shutil, "disk_usage", lambda path: usage(path)._replace(free=100_000)
    )
    built_elsewhere(rf"{folder} cannot be used \(No space left on device\)")
    assert runs(compiler) == 2 and not list(folder.iterdir())


def test_a_file_system_that_allows_no_code(folder: Path, monkeypatch: Patch) -> None:
    state = os.statvfs

    class NoCode:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: NoCode if path == folder else state(path))
    built_elsewhere(rf"the file system of {folder} allows no code \(noexec\)")


@pytest.mark.slow
def test_a_limit_of_the_size_of_files(folder: Path) -> None:
    """The compiler may not write files that are larger than 4 kB."""
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    build(text())
except CannotBuild as error:
    print(error)
"""
    done = python(code)
    assert "File too large" in done.stdout or "File size limit" in done.stdout, done.stderr
    assert not list(folder.iterdir())


def test_owners_in_a_container(monkeypatch: Patch) -> None:
    """Root outside of a user's container is nobody inside of it, and owns the way to its files."""
    read = Path.read_text
    inside = {"/proc/self/uid_map": "1000 1000 1\n", "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: inside.get(str(path)) or read(path))
    assert library_cache._trusted_users() == {0, os.geteuid(), 65534}
    inside["/proc/self/uid_map"] = "         0          0 4294967295\n"
    assert library_cache._trusted_users() == {0, os.geteuid()}
