"""Durations and foreign text, formatted for a terminal."""


def duration(seconds: float) -> str:
    """Format a time in s, ms or us, to three digits: `1.20 s`, `12.3 ms`, `4.56 us`."""
    if seconds >= 1.0:
        unit, value = "s", seconds
    elif seconds >= 1e-3:
        unit, value = "ms", seconds * 1e3
    else:
        unit, value = "us", seconds * 1e6
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def printable(text: str) -> str:
    """Replace unprintable characters in text from foreign files; some would control the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
