"""The environment switches of this package, all of them, each with its meaning.

| variable | default | meaning |
|---|---|---|
| `STREAMKL_CACHE_DIR` | `~/.cache/streamkl_cupy` | folder of compiled kernels; may be shared, may be deleted |
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE_DIR = "STREAMKL_CACHE_DIR"


def cache_dir() -> Path | None:
    """Folder of compiled kernels, or None where no home folder is known and none was named.

    Read anew each time: a compile is far slower than a look-up, and a program may set the variable after the import.
    """
    named = os.environ.get(CACHE_DIR)
    try:
        # Absolute at once, so that a later chdir cannot split the cache in two.
        return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "streamkl_cupy"
    except RuntimeError:
        # pathlib could resolve no home: neither HOME nor an entry in the user database (common in containers).
        return None
