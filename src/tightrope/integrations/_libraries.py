"""The part of each library that holds the code of its models."""

from __future__ import annotations

#: Package -> prefixes of the modules that hold model code; a package that is not listed holds nothing else.
MODEL_CODE = {
    "transformers": ("transformers.models.",),
    "diffusers": ("diffusers.models.",),
}


def is_helper(module: str | None, caller: str | None) -> bool:
    """Return True if a function of a module is model code of the same package as its caller."""
    package = (module or "").partition(".")[0]
    same = bool(package) and package == (caller or "").partition(".")[0]
    return same and is_model_code(module)


def is_model_code(module: str | None) -> bool:
    """Return True if a module may hold the code of models."""
    name = module or ""
    return name.startswith(MODEL_CODE.get(name.partition(".")[0], ("",)))
