"""The exceptions this package raises beyond TypeError, ValueError and NotImplementedError."""

from __future__ import annotations


class StreamKLError(RuntimeError):
    """Base of every run-time failure that is not the caller's argument."""


class DriverError(StreamKLError):
    """No usable NVIDIA driver or GPU, or a GPU this package cannot drive."""


class CompilerError(StreamKLError):
    """NVRTC is missing, or it refused a kernel; the message carries its log."""


class CaptureError(StreamKLError):
    """A call under CUDA-graph capture needs work that cannot be captured, such as a first compile."""
