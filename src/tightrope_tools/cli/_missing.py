"""The line that names missing packages."""


def without(*missing: str) -> str:
    """Return one line that names missing packages and how to install them."""
    return (
        f"The tightrope command needs {', '.join(missing)}. Install with `python -m pip install "
        '"tightrope[cli]"`, or in a clone of the repository with '
        "`pip install --no-build-isolation '.[cli]'`."
    )
