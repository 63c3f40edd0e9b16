"""Devices behind one narrow seam: the simulator now, CUDA next to it."""
