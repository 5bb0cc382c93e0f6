"""Rotary position embedding in NumPy: the implementation that check.py checks by default.

An example for other languages: integers that wrap, cosines in float64, and where other libraries round.
"""

import math

import numpy as np


def to_dtype(values, dtype):
    """Round float32 numbers to a dtype; the result is float32 again."""
    values = values.astype(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # to nearest, ties to even
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values


def channels(spec):
    """Return the two channels of every pair."""
    start, half = spec["start"], spec["rotary_dim"] // 2
    if spec["interleaved"]:
        return start + 2 * np.arange(half), start + 2 * np.arange(half) + 1
    return start + np.arange(half), start + half + np.arange(half)


def frequencies(spec, seq_len):
    """Return the frequency of every pair, float64, in radians per position."""
    dim, base, rule = spec["rotary_dim"], spec["base"], spec["scaling"] or {"rule": "default"}
    if spec["axes"]:
        return np.array([base ** (-2 * k / own) for _, k, own in spec["axes"]["pairs"]])
    k, name, factor = np.arange(dim // 2), rule["rule"], rule.get("factor")
    plain, original = base ** (-2 * k / dim), rule.get("original_max_position")
    if name in ("ntk", "dynamic"):
        scale = (
            factor if name == "ntk" else factor * max((seq_len or 0) / original, 1) - (factor - 1)
        )
        return (base * scale ** (dim / (dim - 2))) ** (-2 * k / dim)
    if name == "yarn":
        turns = np.array([rule["beta_fast"], rule["beta_slow"]])
        low, high = dim * np.log(original / (2 * math.pi * turns)) / (2 * math.log(base))
        if rule["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        slowed = np.clip((k - low) / max(high - low, 0.001), 0, 1)
        return plain * (1 - slowed) + plain / factor * slowed
    if name == "llama3":
        low, high = rule["low_freq_factor"], rule["high_freq_factor"]
        kept = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return plain * kept + plain / factor * (1 - kept)
    if name == "longrope":
        return plain / np.array(
            rule["long_factor" if (seq_len or 0) > original else "short_factor"]
        )
    if name == "proportional":
        return np.where(k < int(rule["rotary_fraction"] * dim // 2), plain / factor, 0.0)
    return np.array(rule["inv_freq"]) if name == "given" else plain / (factor or 1.0)


def rotate(x, positions, phase_words, case, dtype):
    """Rotate x (tokens, channels) by exact angles; integers wrap, so any position is exact."""
    axis = (
        np.array([pair[0] for pair in case["spec"]["axes"]["pairs"]]) if case["spec"]["axes"] else 0
    )
    words = phase_words[axis, np.arange(phase_words.shape[1])].astype(np.uint64)
    turns = (positions.astype(np.uint64)[axis].T.reshape(len(x), -1) * words).view(np.int64)
    angle = turns.astype(np.float64) * (2 * math.pi / 2**64) * (-1 if case["inverse"] else 1)
    scale = case["attention_scaling"] ** (-1 if case["inverse"] else 1)
    first, second = channels(case["spec"])
    y, cos, sin = x.astype(np.float64), np.cos(angle) * scale, np.sin(angle) * scale
    u, v = y[:, first], y[:, second]
    y[:, first], y[:, second] = u * cos - v * sin, v * cos + u * sin
    return to_dtype(y, dtype)


def rotate_by_tables(x, cos, sin, case, dtype, rounding):
    """Rotate x (tokens, channels) by tables (tokens, pairs) as a stack rounds."""
    first, second = channels(case["spec"])
    if case["tables"] == "dtype of x":
        cos, sin = to_dtype(cos, dtype), to_dtype(sin, dtype)
    wide = np.float64 if rounding == "once" else np.float32
    narrow = (lambda a: to_dtype(a, dtype)) if rounding == "each" else (lambda a: a)
    y, cos, sin = x.astype(wide), cos.astype(wide), sin.astype(wide)
    u, v = y[:, first], y[:, second]
    y[:, first] = narrow(u * cos) - narrow(v * sin)
    y[:, second] = narrow(v * cos) + narrow(u * sin)
    return to_dtype(y, dtype)
