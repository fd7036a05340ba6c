"""Numbers as short texts: figures, durations, counts, sparklines, bars, and words wrapped to a width."""

import math
from collections.abc import Iterable, Mapping, Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def figure(value: float, form: str) -> str:
    """A formatted number, or "-" for NaN."""
    return "-" if math.isnan(value) else format(value, form)


def with_spread(value: float, spread: float) -> str:
    """A mean and the standard deviation over hosts, e.g. "58.41 ± 2.10"; only the mean if there is a single host."""
    return figure(value, ".2f") + ("" if math.isnan(spread) else f" ± {spread:.2f}")


def counts(numbers: Mapping[str, int]) -> str:
    """The nonzero counts, e.g. "wait 510 germinate 61"."""
    return " ".join(f"{name.lower()} {number}" for name, number in numbers.items() if number) or "none"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. "1:02:03" or "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(num_bytes: int) -> str:
    """Memory, e.g. "330 MB" or "1.25 GB"."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """At most `width` characters, one for each part of `values`: the last value of the part between `low` and `high`.

    A value that was not measured (NaN) is a blank.
    """
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _LEVELS[min(max(round((v - low) * scale), 0), len(_LEVELS) - 1)] if math.isfinite(v) else " " for v in values
    )


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` characters at most, in eighths of a character; never empty if `share` > 0."""
    eighths = min(math.ceil(share * width * 8), width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def wrapped(words: Iterable[str], width: int) -> list[str]:
    """The words in lines of at most `width` characters, two blanks apart; a longer word is cut."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(word[:width])
    return lines
