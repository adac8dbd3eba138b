"""The folders of generated libraries, and files in them that can be trusted to be whole.

A library is code that this process runs. So it is loaded only from a folder, on a way to it, and
from a file that none but this user and root can change, and only if it is what was written. A new
library takes its name in one step: processes that build the same one at once need no locks.
"""

from __future__ import annotations

import atexit
import contextlib
import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

_SEAL = b"fusedrnn library"
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size
_WORK = "work-"
_ABANDONED_SECONDS = 86400  # after which a killed process's working folder is removed


class Unusable(Exception):
    """Why a folder is not used, as the end of a sentence."""


def wanted_folder() -> Path:
    """Where libraries are kept between processes. Raises Unusable if that is unknown."""
    if named := os.environ.get("FUSEDRNN_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(named)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification wants relative paths ignored
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise Unusable("the home folder is unknown")
        base = os.path.join(home, ".cache")
    return Path(os.path.abspath(base), "fusedrnn")


def open_folder(path: Path) -> Path:
    """The folder without symbolic links, made if need be. Raises Unusable."""
    try:
        missing = []
        existing = path
        while not os.path.lexists(existing):
            missing.append(existing.name)
            existing = existing.parent
        existing = _checked(existing, is_way=bool(missing))
        for name in reversed(missing):
            existing = existing / name
            with contextlib.suppress(FileExistsError):  # another process was faster
                existing.mkdir(mode=0o700)
        return _usable(existing)
    except OSError as error:
        raise Unusable(f"{path} cannot be used ({error.strerror})") from None


def _usable(path: Path) -> Path:
    """A folder that is there: checked, and on a file system from which code is loaded."""
    path = _checked(path)
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        raise Unusable(f"the file system of {path} allows no code (noexec)")
    return path


def _checked(path: Path, is_way: bool = False) -> Path:
    """An absolute path, its symbolic links followed; nobody else may be able to exchange a part.

    ``is_way``: whether files are put into folders below it only.
    """
    done, waiting, links = Path("/"), list(path.parts[1:]), 0
    _check_folder(done, os.lstat(done), is_way=is_way or bool(waiting))
    while waiting:
        name = waiting.pop(0)
        if name == "..":
            done = done.parent
            continue
        here = done / name
        state = os.lstat(here)
        if not stat.S_ISLNK(state.st_mode):
            _check_folder(here, state, is_way=is_way or bool(waiting))
            done = here
            continue
        _check_owner(here, state)
        links += 1
        if links > 40:
            raise Unusable(f"{path} has too many symbolic links")
        target = Path(os.readlink(here))
        if target.is_absolute():
            done, target = Path("/"), target.relative_to("/")
        waiting[:0] = target.parts
    return done


def _check_folder(path: Path, state: os.stat_result, is_way: bool) -> None:
    if not stat.S_ISDIR(state.st_mode):
        raise Unusable(f"{path} is not a folder")
    _check_owner(path, state)
    # In a sticky folder, others can add files but not exchange those that are there.
    is_sticky = bool(state.st_mode & stat.S_ISVTX)
    if _others_write(state) and not (is_way and is_sticky):
        raise Unusable(f"other users can write to {path}")


def _check_owner(path: Path, state: os.stat_result) -> None:
    if state.st_uid not in _trusted_users():
        raise Unusable(f"{path} belongs to another user (uid {state.st_uid})")


def _trusted_users() -> set[int]:
    trusted = {0, os.geteuid()}
    # In a container of a user who is not root outside, what root outside owns has the owner nobody.
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return trusted


def _others_write(state: os.stat_result) -> bool:
    if state.st_mode & stat.S_IWOTH:
        return True
    return bool(state.st_mode & stat.S_IWGRP) and not _is_own_group(state.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether a group has no other member: many systems make one for each user."""
    try:
        user = pwd.getpwuid(os.geteuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    is_of_user = entry.gr_gid == user.pw_gid and entry.gr_name == user.pw_name
    return is_of_user and set(entry.gr_mem) <= {user.pw_name}


def process_folder(why: str) -> Path:
    """A folder of this process alone, removed at its end, instead of one that is not used."""
    global _process_folder
    process = os.getpid()
    if _process_folder is None or _process_folder[0] != process:  # a fork leaves its parent's alone
        try:
            path = _usable(Path(tempfile.mkdtemp(prefix="fusedrnn-")).absolute())
        except (OSError, Unusable) as error:
            raise Unusable(f"{why}, and there is no temporary folder: {error}") from None
        _process_folder = (process, path)
        atexit.register(_remove_folder, process, path)
        warnings.warn(
            f"fusedrnn: compiled cells are kept for this process only, because {why}; "
            "set FUSEDRNN_CACHE to another folder",
            RuntimeWarning,
            stacklevel=2,
        )
    return _process_folder[1]


_process_folder: tuple[int, Path] | None = None


def _remove_folder(process: int, path: Path) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def is_whole(path: Path) -> bool:
    """Whether a file is there, and is a library as it was stored. Raises Unusable."""
    return bool(read(path))


def read(path: Path) -> bytes | None:
    """What was stored in a file; None if it is not there, or is not whole. Raises Unusable."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(number)
            if not stat.S_ISREG(state.st_mode):
                return None
            _check_owner(path, state)
            if _others_write(state):
                raise Unusable(f"other users can write to {path}")
            with open(number, "rb", closefd=False) as file:
                content = file.read()
        finally:
            os.close(number)
    except OSError:
        return None
    stored, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    return stored if seal == _seal_of(stored) else None


def write(path: Path, content: bytes) -> None:
    """Stores a file for :func:`read`, whole or not at all. Raises Unusable."""
    try:
        number, name = tempfile.mkstemp(prefix=_WORK, dir=path.parent)
        try:
            with open(number, "wb") as file:
                file.write(content + _seal_of(content))
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise Unusable(f"{path.parent} cannot be used ({error.strerror})") from None


def _seal_of(library: bytes) -> bytes:
    return _SEAL + hashlib.sha256(library).digest()


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """A folder inside of another one, for the time of one build."""
    for path in folder.glob(_WORK + "*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    work = Path(tempfile.mkdtemp(prefix=_WORK, dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def store(text: Path, library: Path, folder: Path, name: str) -> Path:
    """Gives the finished files of a working folder their names in ``folder``.

    Loaders ignore what follows a library in its file, so its digest stands there. If another
    process was faster, its library stays: on a network's file system, machines that use it would
    lose it.
    """
    seal = _seal_of(library.read_bytes())
    with open(library, "ab") as file:
        file.write(seal)
    for path in (text, library):
        path.chmod(0o644)  # a folder of mode 0700 keeps others out; one for many users does not
    os.replace(text, folder / f"{name}.cpp")
    stored = folder / f"{name}.so"
    try:
        os.link(library, stored)
    except OSError:  # there is one already, or the file system has no links
        if not is_whole(stored):
            os.replace(library, stored)
    return stored
