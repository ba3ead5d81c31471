"""Folders of modules that each have an entry: adding one is adding its file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def entries_of(package: str, path: Iterable[str], name: str, others: Collection[str]) -> dict[str, Any]:
    """What the modules of a package have as `name`, by the modules' names; `others` are no entries."""
    found = (module.name for module in iter_modules(path))
    return {module: getattr(import_module(f"{package}.{module}"), name) for module in found if module not in others}
