"""The kinds of findings: for each code its severity, the fault in one sentence, and what mends it.

Words in braces are filled in where a finding is added.
"""

from __future__ import annotations

from collections.abc import Mapping

ERRORS = {
    "cannot-call": "No call was found that returns a rotated x of the same shape.",
    "raises": "A call that worked at first raised an error.",
    # channels
    "record": "The weights have {recorded} pairing, as tightrope_convert.json says, but the code has {seen} pairing.",
    "pairing": "Channels are paired {seen}; {meant} was declared.",
    "pairing-distance": "Channels are paired {seen}; {meant} was declared.",
    "slice": "Channels {seen} rotate; {meant} were declared.",
    "table-pairing": "The two channels of a pair turn by different angles: channels have one pairing, and cosines and "
    "sines have the order of the other.",
    "not-pairs": "Channels turn neither in half nor in interleaved pairs.",
    "pass-through": "Channels {channels} belong to no pair but are changed.",
    # rotation and direction
    "sign": "{pairs} in the opposite direction to {whose}: the sine has the wrong sign.",
    "sign-missing": "The two sines of a pair have the same sign; in a rotation one of them is negative.",
    "swapped-tables": "Cosine and sine are swapped: at position 0 every pair turns by a quarter turn.",
    "not-a-rotation": "The two channels of a pair are scaled by different factors, so this is not a rotation.",
    "not-linear": "The function does more than rotate x: {what}.",
    "amplitude": "The rotated channels are multiplied by {seen:.6g}, not by {meant:.6g}.",
    "does-nothing": "The function returns x unchanged at every position.",
    # positions and frequencies
    "axes": "Coordinates do not turn the pairs declared for them.",
    "phase": "Position 0 is rotated by angles that no position offset explains.",
    "base": "The base is {seen:g}; {meant:g} was declared.",
    "scaling": "{what}.",
    "scaling-ignored": "The declared scaling is not applied: frequencies are those of {plain!r}.",
    "denominator": "The exponents of the frequencies are divided by head_dim, {head_dim}, not by rotary_dim, "
    "{rotary_dim}.",
    "frequencies": "The frequencies are not the declared ones.",
    "position-dtype": "Positions are rounded to {dtype}{x}.",
    "frequency-dtype": "The frequencies are rounded to {dtype}{x}.",
    "angle-dtype": "Angles, position times frequency, are rounded to {dtype}{x}.",
    "position-jump": "From {count} {size:,} on, positions are off by {jump:+d}.",
    "padding-id": "Ids count from {first}, as where lower ones are padding: position 0 stays, later positions are off by "
    "{jump:+d}.",
    "far-angles": "Angles are wrong{where}.",
    "table-clamp": "All positions from {size:,} on are rotated as position {last:,}.",
    "table-wrap": "Positions start again at {size:,}: p is rotated as p modulo {size:,}.",
    "table-identity": "Tokens at positions from {size:,} on are returned unrotated.",
    "table-zero": "Tokens at positions from {size:,} on come back as zeros.",
    "table-nan": "Tokens at positions from {size:,} on come back as NaN.",
    "relative": "Scores depend on the positions of q and k, not only on their distance.",
    # what a result depends on
    "history": "{what} depends on earlier calls{how}.",
    "batch": "The result of a row depends on the {what} of the other rows in its batch.",
    "row-positions": "All rows of a batch get the positions of row 0.",
    "heads": "{what}.",
    "numbered-through": "Rows are numbered through: only the first of a call starts at position 0.",
    "first-id": "Only the {which} id of a call is used: tokens are numbered from it on.",
    "last-id": "Only the {which} id of a call is used: tokens are numbered up to it.",
    "restarts": "Ids that fall or start again are not followed: a token gets the largest id up to its own place.",
    "offset-ignored": "The position of the first token is ignored: every call is rotated as if it began at position 0.",
    "positions-ignored": "Positions are ignored: tokens are rotated as if at positions 0 to n − 1.",
    "position-order": "Tokens get the positions of the call in rising order, not each its own.",
    "nondeterminism": "Equal calls give different results.",
    "k-not-rotated": "k is returned unchanged; only q is rotated.",
    "q-k": "q and k are rotated differently.",
    # inputs and results
    "mutates": "x is overwritten{how}.",
    "mutates-positions": "The positions are overwritten.",
    "mutates-tables": "The given cosines and sines are overwritten.",
    "strides": "An x {what} is rotated wrongly.",
    "position-type": "Positions in {what} give a different result than in int64.",
    "shape-dependent": "{what} is rotated differently {than}.",
    "grouped": "k with fewer heads than q gives a different result.",
    "not-finite": "The function returns NaN or infinite values for finite x and positions.",
    "gradient-missing": "The gradient of {name} is missing: the result does not depend on {name} for autograd.",
    "gradient-wrong": "The gradient of {name} is wrong: {cause}.",
    "gradient-raises": "The forward or backward pass raises if {name} requires grad.",
}
WARNINGS = {
    "config-unread": "The configuration cannot be read, so the rotation was not compared with what is meant.",
    "amplitude-varies": "The factor on the rotated channels depends on position or pair, as with xPos or a gate.",
    "position-offset": "Positions are off by {whole:+d}: position 0 is rotated as position {whole} should be.",
    "denominator-or-base": "The base is {seen:g}; or it is {base:g}, and the exponents are divided by head_dim, "
    "{head_dim}, not by rotary_dim, {rotary_dim}.",
    "table-dtype": "Cosines and sines are rounded to {dtype} although x is float32.",
    "length": "How a token is rotated depends on the last position of the call, as with dynamic scaling.",
    "strides-refused": "An x {what} is refused.",
    "refuses": "An x of {what} is refused.",
    "output-dtype": "An x of {what} comes back as {dtype}.",
    "shapes": "An x with {what} is refused.",
    "grouped-refused": "k with fewer heads than q is refused.",
}
NOTES = {
    "channel-order": "Channels come out in a different order.",
    "fast": "{count} pairs turn backwards, or forwards by more than π per position.",
    "half-turns": "Channels only change their sign, as if each pair turned by π per position.",
    "blocks": "Channels turn in {blocks} blocks of half pairs, one after the other.",
    "frequencies-unchecked": "The caller provides cosines and sines, so the audit did not check the declared {what}.",
    "partner-unseen": "The function that {does} the cosines and sines was not seen.",
    "angle-error": "Below position {position:,} a cosine or sine is off by up to {size:.2g}: the angles are products "
    "in float32.",
    "table-end-refused": "Positions from {first:,} on are refused.",
    "position-types": "Positions in {what} are refused.",
}
SENTENCES = ERRORS | WARNINGS | NOTES

_ROTATE = "call tightrope.functional.rotate(x, {spec}, positions{layout})"
_LONGER = "make the table longer, or " + _ROTATE

#: ``{spec}`` is the declared or the identified rotation. Of a code that is not here, the mend is to call this library.
MENDS = {
    "cannot-call": "state form=, layout= and head_dim=, or audit a function of (x, positions) that calls it",
    "raises": "make the function accept this call, or state form= and layout=",
    "refuses": "make the function accept this call, or state form= and layout=",
    "config-unread": "correct the configuration, or declare the rotation with spec= or --meant",
    # channels
    "record": "run these weights with code whose pairing is {recorded}, or convert them back: "
    "tightrope convert FOLDER OUT --to {seen}",
    "pairing": f"{_ROTATE}, or convert the weights to the other pairing with tightrope convert",
    "table-pairing": "widen tables by torch.cat((t, t), -1) for half pairing, by t.repeat_interleave(2, -1) for "
    "interleaved pairs",
    "pass-through": "return the channels outside the slice as they are, or " + _ROTATE,
    "channel-order": "keep q and k in this order only between this function and the scores",
    # rotation and direction
    "sign": "negate the sines, or the positions: tightrope.functional.rotate(x, {spec}, -positions{layout}) turns as "
    "this function does",
    "sign-missing": "subtract: (u cos − v sin, v cos + u sin); or, if the function is made for sines that hold the "
    "sign, pass torch.cat((-sin, sin), -1) for half pairing, torch.stack((-sin, sin), -1).flatten(-2) for interleaved",
    "fast": "declare the rotation with spec=",
    "half-turns": "declare the rotation with spec=",
    "blocks": "audit a function of one block",
    "swapped-tables": "exchange cosines and sines in the function; or, if it takes them, pass the sines as cosines "
    "and the cosines as sines",
    "not-a-rotation": "use the same cosine and the same sine for both channels: (u cos − v sin, v cos + u sin)",
    "not-linear": "audit the rotation alone, without the norm, the activation or the constant around it",
    "amplitude": "declare the factor by the scaling of the spec, or drop it",
    "amplitude-varies": "declare xPos or a gate, or drop the factor",
    # positions and frequencies
    "axes": _ROTATE + " with positions from tightrope.positions.multi_axis",
    "position-offset": "subtract the offset from the positions",
    "phase": "make the angle 0 at position 0",
    "denominator": "divide the exponents by rotary_dim: " + _ROTATE,
    "denominator-or-base": "divide the exponents by rotary_dim: " + _ROTATE,
    "frequencies-unchecked": "audit it together with the function that makes them: partner=, or --with",
    "partner-unseen": "audit the two as one: pass the other with partner=, or --with",
    "position-dtype": "keep positions in int64 or float32 until they are multiplied; or " + _ROTATE,
    "frequency-dtype": f"keep the frequencies in float32, also when the model is cast; or {_ROTATE}",
    "angle-dtype": "compute angles in float32 and cast only cosines and sines; or " + _ROTATE,
    "table-dtype": "keep cosines and sines in float32 for float32 x; or " + _ROTATE,
    "angle-error": _ROTATE + ", whose angles are exact at any position",
    "padding-id": "count ids from 0, and cover padding with a mask",
    "position-jump": "count positions from the first token of the sequence at every step",
    **dict.fromkeys(("table-clamp", "table-wrap", "table-identity"), _LONGER),
    **dict.fromkeys(("table-zero", "table-nan", "table-end-refused"), _LONGER),
    # what a result depends on
    "history": "compute tables from the positions of the call alone, in float32, and never from what earlier calls left",
    "batch": "compute each row from its own positions",
    "row-positions": "take the positions of every row: tables of shape (rows, tokens, channels)",
    "length": "declare dynamic scaling with spec=, or use frequencies that do not depend on the length",
    "heads": "state the layout of x: layout= here, and the dimension of tokens where the function is called; "
    'tightrope.functional.rotate(x, {spec}, layout="bhsd") rotates (batch, heads, tokens, channels)',
    "position-order": "rotate each token by its own position, and do not sort positions",
    **dict.fromkeys(
        ("first-id", "last-id", "restarts"),
        "rotate each token by its own id: in packed, padded and "
        "image rows, ids start again, repeat and leave gaps",
    ),
    "offset-ignored": "add the position of the first token, which is not 0 after a cache",
    "numbered-through": "subtract the start of each row from the numbers of its tokens",
    "positions-ignored": "use the positions that are passed",
    "nondeterminism": "rotate without random numbers",
    "k-not-rotated": "rotate k as well as q",
    "q-k": "rotate q and k by the same function",
    # inputs and results
    "mutates": "write to a copy of x, or end the name of the function in _",
    "mutates-positions": "do not write to the positions",
    "mutates-tables": "do not write to the tables, which all layers share",
    "strides": "index x by its shape, not by its memory",
    "strides-refused": "use reshape instead of view, or contiguous()",
    "position-type": "convert positions to one dtype first",
    "position-types": "convert positions to int64 first",
    "output-dtype": "return y.to(x.dtype)",
    "shapes": "accept any number of rows, heads and tokens",
    "shape-dependent": "find the dimensions of x by their place, not by their size",
    **dict.fromkeys(("grouped", "grouped-refused"), "rotate q and k by their own numbers of heads"),
    "not-finite": "keep cosines, sines and x finite",
    "gradient-missing": "do not detach x",
    "gradient-wrong": "let autograd differentiate, or rotate the incoming gradient by the negative angles",
    "gradient-raises": "avoid in-place changes of tensors that the backward pass needs",
}


def severity_of(kind: str) -> str:
    """Return the usual severity of a kind: "error", "warning" or "note"."""
    return "error" if kind in ERRORS else "warning" if kind in WARNINGS else "note"


def mend_of(kind: str, spec: str, layout: str, words: Mapping[str, object]) -> str:
    """Return what mends a finding of a kind.

    Args:
        spec: the rotation to call, as Python code.
        layout: the layout of x.
        words: what the sentence is filled in with.
    """
    option = "" if layout == "bhsd" else f', layout="{layout}"'
    text = MENDS.get(kind, _ROTATE)
    for name, word in {**words, "spec": spec, "layout": option}.items():
        text = text.replace(f"{{{name}}}", str(word))
    return text
