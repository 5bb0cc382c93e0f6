"""Foreign text, formatted for a terminal."""


def printable(text: str) -> str:
    """Replace unprintable characters in text from foreign files; some would control the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
