"""Readings of GPUs (NVML), host (psutil), and the sampler thread."""
