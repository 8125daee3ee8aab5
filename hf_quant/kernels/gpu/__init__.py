"""Shared by the GPU backends of all ops: how Triton kernels are launched, and how they decode weights."""
