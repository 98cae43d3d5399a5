"""Bytes, rates and durations as people read them. One function per unit, used everywhere a number is shown."""

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def three_digits(value: float) -> str:
    """Three significant digits without exponent, e.g. 0.123, 4.57, 31.8, 412, 12,300."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"


def format_bytes(num_bytes: float) -> str:
    """Memory and file sizes: `5.20 GiB`, `512 MiB`, `12 B`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{three_digits(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Transfer rates in decimal GB/s, as links and drives are specified: `55.3 GB/s`."""
    return f"{three_digits(bytes_per_s / 1e9)} GB/s"


def format_duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 10 min`, `1 d 4 h`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, s = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {s} s" if s and minutes < 10 else f"{minutes} min"
    hours, m = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {m} min" if m else f"{hours} h"
    days, h = divmod(hours, 24)
    return f"{days} d {h} h" if h else f"{days} d"


def format_count(number: float) -> str:
    """Parameters and tokens: `7.62 B`, `134 M`, `5,212`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= unit:
            return f"{three_digits(number / unit)} {name}"
    return f"{number:,.0f}"
