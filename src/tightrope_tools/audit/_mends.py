"""The advice for each code of a finding. ``{spec}`` is the declared or the identified rotation."""

_ROTATE = "call tightrope.functional.rotate(x, {spec}, positions)"

MENDS = {
    "cannot-call": "state form=, layout= and head_dim=, or audit a function of (x, positions) that calls it",
    "raises": "make the function accept this call, or state form= and layout=",
    # channels
    "pairing": f"{_ROTATE}, or convert the weights to the other pairing with tightrope convert",
    "slice": _ROTATE,
    "table-pairing": "widen tables by torch.cat((t, t), -1) for half pairing, by t.repeat_interleave(2, -1) for "
    "interleaved pairs",
    "not-pairs": _ROTATE,
    "pass-through": "return the channels outside the slice as they are, or " + _ROTATE,
    "channel-order": "keep q and k in this order only between this function and the scores",
    # rotation and direction
    "sign": "negate the sines, or the positions: tightrope.functional.rotate(x, {spec}, -positions) turns as this "
    "function does",
    "sign-missing": "subtract: (u cos − v sin, v cos + u sin); or, if the function is made for sines that hold the "
    "sign, pass torch.cat((-sin, sin), -1) for half pairing, torch.stack((-sin, sin), -1).flatten(-2) for interleaved",
    "fast": "declare the rotation with spec=",
    "blocks": "audit a function of one block",
    "swapped-tables": "exchange cosines and sines in the function; or, if it takes them, pass the sines as cosines "
    "and the cosines as sines",
    "not-a-rotation": "use the same cosine and the same sine for both channels: (u cos − v sin, v cos + u sin)",
    "not-linear": "audit the rotation alone, without the norm, the activation or the constant around it",
    "amplitude": "declare the factor by the scaling of the spec, or drop it",
    "amplitude-varies": "declare xPos or a gate, or drop the factor",
    "does-nothing": _ROTATE,
    # positions and frequencies
    "axes": _ROTATE + " with positions from tightrope.positions.multi_axis",
    "position-offset": "subtract the offset from the positions",
    "phase": "make the angle 0 at position 0",
    "base": _ROTATE,
    "scaling": _ROTATE,
    "scaling-ignored": _ROTATE,
    "denominator": "divide the exponents by rotary_dim: " + _ROTATE,
    "frequencies": _ROTATE,
    "frequencies-unchecked": "audit a function of (x, positions) that makes them",
    "position-dtype": "keep positions in int64 or float32 until they are multiplied; or " + _ROTATE,
    "frequency-dtype": "keep the frequencies in float32, also when the model is cast; or "
    + _ROTATE,
    "angle-dtype": "compute angles in float32 and cast only cosines and sines; or " + _ROTATE,
    "table-dtype": "keep cosines and sines in float32 for float32 x; or " + _ROTATE,
    "angle-error": _ROTATE + ", whose angles are exact at any position",
    "position-jump": "count positions from the first token of the sequence at every step",
    "far-angles": _ROTATE,
    "table-clamp": "make the table longer, or " + _ROTATE,
    "table-wrap": "make the table longer, or " + _ROTATE,
    "table-identity": "make the table longer, or " + _ROTATE,
    "table-zero": "make the table longer, or " + _ROTATE,
    "table-nan": "make the table longer, or " + _ROTATE,
    "table-end-refused": "make the table longer, or " + _ROTATE,
    "relative": _ROTATE,
    # what a result depends on
    "history": "compute tables from the positions of the call alone, in float32, and never from what earlier calls left",
    "batch": "compute each row from its own positions",
    "row-positions": "take the positions of every row: tables of shape (rows, tokens, channels)",
    "length": "declare dynamic scaling with spec=, or use frequencies that do not depend on the length",
    "heads": "state the layout of x: layout= here, and the dimension of tokens where the function is called; "
    'tightrope.functional.rotate(x, {spec}, layout="bhsd") rotates (batch, heads, tokens, channels)',
    "position-order": "rotate each token by its own position, and do not sort positions",
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
    "grouped": "rotate q and k by their own numbers of heads",
    "not-finite": "keep cosines, sines and x finite",
    "gradient-missing": "do not detach x",
    "gradient-wrong": "let autograd differentiate, or rotate the incoming gradient by the negative angles",
    "gradient-raises": "avoid in-place changes of tensors that the backward pass needs",
}


def mend_of(code: str, spec: str) -> str:
    """Return what mends a finding.

    Args:
        spec: the rotation to call, as Python code.
    """
    text = MENDS.get("raises" if code.startswith("refuses-") else code, "")
    return text.replace("{spec}", spec)
