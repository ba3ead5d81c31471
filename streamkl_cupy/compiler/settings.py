"""The environment switches of this package, all of them, each with its meaning.

| variable | default | meaning |
|---|---|---|
| `STREAMKL_CACHE_DIR` | `~/.cache/streamkl_cupy` | folder of compiled kernels; may be deleted; for sharing see below |
| `STREAMKL_CACHE_TRUST` | | `1`: also use a folder that others own or can write to |

Kernels are code that runs in this process. Without the switch they are read and kept only where nobody but this user
and root can put them. So a folder of root's may be shared with everybody for reading. Those who write to one folder, as
a group does, or read what another user compiled, set the switch and trust everybody who can write there.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE_DIR = "STREAMKL_CACHE_DIR"
CACHE_TRUST = "STREAMKL_CACHE_TRUST"


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


def cache_trusts_all() -> bool:
    """Whether a folder of kernels is used whoever owns it or can write to it."""
    return os.environ.get(CACHE_TRUST) == "1"
