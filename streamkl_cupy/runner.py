"""What a backend offers for a problem: the one thing that calls ask of NumPy and of CUDA alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .arrays import Gradients, Inputs, MaskArrays, Results, Saved
    from .problem import Problem


class Runner(Protocol):
    """A Problem made ready for one device; may be called from any thread, with other arrays of the same problem.

    Streams are handles, workspaces addresses; a backend without them is given 0.
    """

    problem: Problem
    workspace_bytes: int
    """Of a forward."""

    @property
    def plan(self) -> Any:
        """What a call would run, printable."""

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """Leave nothing for a first call to do."""

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients."""

    def forward(
        self, inputs: Inputs, outputs: Results, stream: int, workspace: int = 0, masks: MaskArrays | None = None
    ) -> None:
        """Write every element of the outputs."""

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
    ) -> None:
        """Write every gradient that has an output; `room` are the bytes of the workspace, all that is asked for unless
        given."""
