"""Exact fp32 masters as a bf16 half and a 16-bit rest.

The half is the master rounded half up (adding 0x8000 to its bits), so the rest always fits a signed 16-bit number and
half and rest together give back every bit. Rounding to nearest even would overflow the rest on ties.
"""

import torch


def split_master(master: torch.Tensor, half: torch.Tensor, rest: torch.Tensor) -> None:
    """master: [n] fp32, finite, kept. half: [n] bf16 and rest: [n] int16, overwritten."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    half.view(torch.int16).copy_(high)  # the low 16 bits of `high`: copying narrows by wrapping around
    rest.copy_(bits - (high << 16))


def merge_master(half: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """half: [n] bf16, rest: [n] int16 -> [n] fp32, the exact master."""
    return ((half.view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)
