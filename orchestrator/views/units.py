"""Seconds, bytes and counts as people read them; a dash stands for "not measured"."""

import math
import signal
from datetime import UTC, datetime

NOT_MEASURED = "-"


def seconds(value: float | None) -> str:
    """Render a duration with two or three significant figures."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if value < 0.0995:
        return f"{value * 1000:.0f} ms" if value >= 0.0005 else "0 s"
    if value < 9.95:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    if value < 59.5:
        return f"{value:.0f} s"
    if value < 3599.5:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    if value < 86_370:
        hours, rest = divmod(round(value / 60), 60)
        return f"{hours} h {rest:02d} min"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days} d {hours:02d} h"


def percent(ratio: float | None) -> str:
    """Render a ratio 0..1 in percent."""
    if ratio is None or not math.isfinite(ratio):
        return NOT_MEASURED
    return f"{ratio:.1%}"


def number(value: float | None, digits: int = 4) -> str:
    """Render a measurement, e.g. a loss."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    return f"{value:,.{digits}f}" if digits else f"{value:,.0f}"


def count(value: int, singular: str, plural: str = "") -> str:
    """Render a count with its noun: `1 node`, `2 nodes`."""
    return f"{value:,} {singular if value == 1 else plural or singular + 's'}"


def size(nbytes: float) -> str:
    """Render bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def rate(per_s: float | None) -> str:
    """Render a rate per second: `12.3k/s`."""
    if per_s is None or not math.isfinite(per_s):
        return NOT_MEASURED
    for scale, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_s >= scale:
            return f"{per_s / scale:.1f}{mark}/s"
    return f"{per_s:.0f}/s"


def speed(bytes_per_s: float | None) -> str:
    """Render bytes per second in decimal units: `1.25 GB/s`."""
    if bytes_per_s is None or not math.isfinite(bytes_per_s):
        return NOT_MEASURED
    for scale, mark in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_per_s >= scale:
            digits = 2 if scale == 1e9 else 0
            return f"{bytes_per_s / scale:.{digits}f} {mark}/s"
    return f"{bytes_per_s:.0f} B/s"


def clock(at: float) -> str:
    """Render a Unix time as local time of day."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")


def date(at: float) -> str:
    """Render a Unix time as local date and time with its offset."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def ranks(numbers: tuple[int, ...]) -> str:
    """Render rank numbers, runs of them shortened: `rank 3`, `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(parts)


def exit_code(code: int) -> str:
    """Say how a process ended; minus the signal's number means that a signal ended it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def plain(value: float) -> float | None:
    """Return the number, or None for one that JSON has no word for."""
    return value if math.isfinite(value) else None
