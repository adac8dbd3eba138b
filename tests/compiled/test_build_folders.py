"""Where libraries are kept: only what this user and root can change is loaded, and only whole."""

from __future__ import annotations

import errno
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from build_cases import GXX, as_another_user, in_child, lanes, python, runs, script, text

from fusedrnn._compile import build as building
from fusedrnn._compile import cache
from fusedrnn._compile.build import CannotBuild, Library, build

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

Patch = pytest.MonkeyPatch


def built_elsewhere(why: str, note: str = "") -> Library:
    """Builds in a folder of this process, and checks the warning that says why."""
    with pytest.warns(RuntimeWarning, match=f"this process only, because .*{why}.*; FUSEDRNN_"):
        library = build(text(note))
    assert lanes(library)
    assert library.path.parent == cache.process_folder("it is there")
    assert library.path.parent.stat().st_mode & 0o777 == 0o700
    return library


def test_the_folder(tmp_path: Path, folder: Path, monkeypatch: Patch) -> None:
    assert cache.wanted_folder() == folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FUSEDRNN_CACHE", "~/mine")
    assert cache.wanted_folder() == tmp_path / "home/mine"
    monkeypatch.setenv("FUSEDRNN_CACHE", "here/../there")
    assert cache.wanted_folder() == tmp_path / "there"
    monkeypatch.setenv("FUSEDRNN_CACHE", "")
    assert cache.wanted_folder() == tmp_path / "home/.cache/fusedrnn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.wanted_folder() == tmp_path / "home/.cache/fusedrnn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.wanted_folder() == tmp_path / "xdg/fusedrnn"


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
    if os.geteuid() == 0:
        os.chown(folder, -1, 54321)  # a group of no name
    in_child(lambda: build(text()))
    folder.chmod(mode)
    if mode == 0o770 and cache._is_own_group(folder.stat().st_gid):
        pytest.skip("this user is the only member of the group")
    in_child(lambda: built_elsewhere(f"other users can write to {folder}"))
    folder.chmod(0o755)
    assert build(text()).is_cached


def test_a_group_of_one_user_is_no_other_user(folder: Path, monkeypatch: Patch) -> None:
    folder.mkdir()
    folder.chmod(0o775)
    if not cache._is_own_group(folder.stat().st_gid):
        pytest.skip("this user has no group of the same name")
    assert build(text()).path.parent == folder
    user = cache.pwd.getpwuid(os.geteuid())
    shared = cache.grp.struct_group((user.pw_name, "x", user.pw_gid, ["somebody"]))
    monkeypatch.setattr(cache.grp, "getgrgid", lambda group: shared)
    assert not cache._is_own_group(user.pw_gid)


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
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder.mkdir(mode=0o755)
    os.chown(folder, 54321, -1)
    built_elsewhere(rf"{folder} belongs to another user \(uid 54321\)")


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
    in_child(lambda: built_elsewhere("link is no folder", "file"))
    if os.geteuid() == 0:
        (tmp_path / "real").chmod(0o700)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        os.lchown(tmp_path / "link", 54321, -1)
        built_elsewhere("link belongs to another user", "of another user")


def test_a_home_that_is_read_only(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FUSEDRNN_CACHE", "/proc/fusedrnn")  # where root cannot write either
    library = built_elsewhere(r"/proc/fusedrnn cannot be used \(No such file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        another = build(text("another"))  # is built in the same folder, and says nothing
    assert another.path.parent == library.path.parent

    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)

    def use() -> None:
        os.environ.update(HOME=str(home), FUSEDRNN_CACHE="", TMPDIR="/tmp")
        cache.tempfile.tempdir = None
        built_elsewhere("Permission denied", "as another user")
        cache._remove_folder(*cache._process_folder)

    as_another_user(use)


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
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
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


def test_a_disk_that_fills_up_while_compiling(folder: Path) -> None:
    """The compiler and this process may not write files that are larger than 4 kB."""
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


# Ways to damage a library.


def cut_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [cut_end, cut_half, flip_bit, append, empty, zero, link, pipe],
)
def test_a_damaged_library_is_built_anew(folder: Path, damage: Callable[[Path], None]) -> None:
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    damage(path)
    library = build(text())
    assert library.path == path and not library.is_cached and lanes(library)
    assert cache.is_whole(path)


def test_a_folder_in_the_place_of_a_library(folder: Path) -> None:
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    path.unlink()
    path.mkdir()
    built_elsewhere("Is a directory")


def test_a_library_that_others_can_change(folder: Path) -> None:
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    path.chmod(0o666)
    built_elsewhere(f"other users can write to {path}")
    if os.geteuid() == 0:
        path.chmod(0o644)
        os.chown(path, 54321, -1)
        with pytest.raises(cache.Unusable, match="belongs to another user"):
            cache.is_whole(path)


def test_a_library_that_is_in_use_is_not_replaced(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A process that began before, and ends later, takes the library that is there by then."""
    in_child(lambda: build(text()))
    (path,) = folder.glob("*.so")
    other = tmp_path / "other"
    path.rename(other)
    compiler = script(tmp_path / "g++", f'mv {other} {path}; exec {GXX} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(building, "_name", lambda *_: path.stem)  # though by another compiler
    number = other.stat().st_ino
    library = build(text())
    assert runs(compiler) == 1 and lanes(library)
    assert library.path.stat().st_ino == number


def test_a_file_system_without_links(folder: Path, monkeypatch: Patch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    assert lanes(build(text()))
    assert len(list(folder.iterdir())) == 2


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    folder.mkdir()
    for name in ("work-old", "work-new", "other"):
        (folder / name).mkdir()
        (folder / name / "stages.so").write_text("")
    for name in ("work-old", "other"):
        os.utime(folder / name, (time.time() - 1e5,) * 2)
    build(text())
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"work-new", "other"}


def test_owners_in_a_container(monkeypatch: Patch) -> None:
    """Root outside of a user's container is nobody inside of it, and owns the way to its files."""
    read = Path.read_text
    inside = {"/proc/self/uid_map": "1000 1000 1\n", "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: inside.get(str(path)) or read(path))
    assert cache._trusted_users() == {0, os.geteuid(), 65534}
    inside["/proc/self/uid_map"] = "         0          0 4294967295\n"
    assert cache._trusted_users() == {0, os.geteuid()}
