"""The embedded default for arrays on the CPU: the same tile streaming, in NumPy."""

from .plan import NumPyPlan, make_plan
from .runner import Runner

__all__ = ["NumPyPlan", "Runner", "make_plan"]
