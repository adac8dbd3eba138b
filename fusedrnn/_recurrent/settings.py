"""What a user says of how sequences run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .._options import check_chunks, check_flag, text_of

AUTO, REQUIRE, NEVER = COMPILE = ("auto", "require", "never")


def check_compile(value: Any) -> None:
    """
    Raises:
        ValueError: It is no value of ``compile``.
    """
    if not isinstance(value, str) or value not in COMPILE:
        names = ", ".join(map(repr, COMPILE))
        raise ValueError(f"fusedrnn: compile must be one of {names}, got {text_of(value)}")


@dataclass(frozen=True)
class Settings:
    """What a user says of how sequences run."""

    chunk_size: int | None
    workspace_bytes: int | None
    compile: str
    recompute: bool

    def __post_init__(self) -> None:
        check_chunks(self.chunk_size, self.workspace_bytes)
        check_compile(self.compile)
        check_flag("recompute", self.recompute)
        if not self.recompute and self._only_recomputes():
            raise ValueError(
                f"fusedrnn: recompute=False cannot be used with {self._only_recomputes()}"
            )

    @staticmethod
    def of(*values: Any) -> Settings:
        """The same object for the same values."""
        try:
            return _settings(*values)
        except TypeError:  # a value that nobody can look up, and that is wrong
            return Settings(*values)

    def _only_recomputes(self) -> str:
        """The option that is for steps which backward takes again; or nothing."""
        if self.compile == REQUIRE:  # programs have chunks, whatever they keep
            return ""
        for name in ("chunk_size", "workspace_bytes"):
            if getattr(self, name) is not None:
                return f"{name} unless compile='require': steps in Python then have no chunks"
        return ""


@functools.lru_cache(256, typed=True)
def _settings(*values: Any) -> Settings:
    return Settings(*values)
