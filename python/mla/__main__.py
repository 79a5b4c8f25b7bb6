"""python -m mla: the mla command."""

import os
import sys

from ._command import command_path
from ._mla import Error


def main() -> None:
    try:
        path = command_path()
    except Error as e:
        sys.exit(f"mla: {e}")
    os.execv(path, ["mla", *sys.argv[1:]])


if __name__ == "__main__":
    main()
