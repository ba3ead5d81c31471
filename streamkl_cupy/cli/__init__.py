"""The command line: `python -m streamkl_cupy doctor | bench | compile`. One module per command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

from ..errors import StreamKLError


def exit_code(name: str, run: Callable[[], int]) -> int:
    """The exit code of a command; what its user can mend is told in one line."""
    # Names of folders and cards, and table rules, may hold what the output's encoding cannot spell.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run()
    except (StreamKLError, ValueError, ImportError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
