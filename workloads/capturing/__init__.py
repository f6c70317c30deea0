"""Capture of a PyTorch step under fake tensors: what is recorded, which kernels stand for the GPU's, the trace."""
