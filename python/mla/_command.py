"""The `mla` command that is shipped with the package."""

from __future__ import annotations

from pathlib import Path

from ._mla import UnsupportedError


def command_path() -> Path:
    """Where the command lies; UnsupportedError when the package was built without it."""
    path = Path(__file__).resolve().parent / "bin" / "mla"
    if not path.is_file():
        raise UnsupportedError(
            f"{path}: no such file; the package was built without the command (MLA_BUILD_CLI=OFF)"
        )
    return path
