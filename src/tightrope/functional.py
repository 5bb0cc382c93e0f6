"""The public functions. Each is a value on the axes of one operator; none keeps state."""

from __future__ import annotations

from typing import TypeAlias, TypeVar, cast

import torch

from . import angles, calls, scan
from ._errors import bad_type, bad_value, describe, integer, public
from .activations import Act, ActLike
from .gates import Gate
from .lrpe import lrpe_rotate_1d as lrpe_rotate_1d, lrpe_rotate_1d_ as lrpe_rotate_1d_
from .ops import reangle, tables as given_tables
from .ops.checks import check_floating, layout_named, prepare
from .positions import PositionsLike
from .spec import PreparedRotation, RopeSpec, SeqLen

# A gate for all, or one for queries and one for keys.
GateLike: TypeAlias = Gate | tuple[Gate | None, Gate | None] | None

# A key, or None where there is none: what comes in is what comes out.
_K = TypeVar("_K", bound=torch.Tensor | None)

# What errors call the tensors.
_X, _Q, _QK = ("x",), ("q",), ("q", "k")


@public("rotate")
def rotate(
    x: torch.Tensor,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    act: Act = None,
    gate: Gate | None = None,
    inverse: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotate the channel pairs of a tensor by the angles of its positions.

    Args:
        x: float32, float64, bfloat16 or float16, shaped as ``layout`` says. Any strides are read as
            they are, without a copy; fast where the channels of a head lie side by side.
        spec: the rotation, or what :meth:`RopeSpec.at` prepared, which brings its positions.
        positions: None for 0..n-1; an int offset; ids ``(tokens,)`` or ``(rows, tokens)`` of int32,
            int64, float32 or float64; or a :class:`tightrope.positions.Positions`.
        layout: "bhsd" (batch, heads, tokens, channels), "bshd", "sbhd", "thd" (packed tokens, heads,
            channels), "bsd" or "sd".
        inv_freq: frequencies in place of the spec's own, in radians per position: floating
            ``(pairs,)`` or ``(heads, pairs)``, or for a spec of several axes ``(axes, heads or 1,
            pairs)``; given or learned. Their phase words are made on the device at each call; see
            docs/numerics.md.
        seq_len: length of the sequences, for rules that depend on it; as of :meth:`RopeSpec.at`.
        act: f, applied to the whole head vector before the rotation: a name of
            :data:`tightrope.activations.ACTS`, such as "silu", or a
            :class:`tightrope.activations.RMSNorm`.
        gate: P, multiplied on the whole head vector after it: a gate of :mod:`tightrope.gates`.
        inverse: undo the rotation, and the gate, instead. An act cannot be undone.
        out: where the result goes, without another pass: of the shape, dtype and device of x, any
            strides (a slot of a key cache, say), sharing no memory with x. It has no gradient.
        backend: None for the fastest; "cpu", "triton" or "reference" to insist on one.

    Returns:
        ``out`` if given, else a new tensor of the shape, dtype and (where they are dense) strides of x. Channels outside
        the rotated slice are copied. Differentiable by x, by floating positions, by inv_freq and by
        the tensors of act and gate, to any order.

    Raises:
        TypeError, ValueError: arguments that do not fit, each with its sentence.
        NotImplementedError: the backend that was insisted on cannot run, with the reason.

    Source: Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> from tightrope import RopeSpec
    >>> q = torch.randn(2, 8, 16, 64)
    >>> rotate(q, RopeSpec(head_dim=64)).shape
    torch.Size([2, 8, 16, 64])
    """
    outs = None if out is None else [out]
    outer = calls.outer(act, gate, 1)
    (y,) = calls.out_of_place(
        *(_X, x, None, spec, positions, layout, inverse, backend),
        *(outs, inv_freq, seq_len, False, outer),
    )
    return y


@public("rotate_")
def rotate_(
    x: torch.Tensor,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    act: Act = None,
    gate: Gate | None = None,
    inverse: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotate a tensor in place: :func:`rotate` without the new tensor.

    The path that an attention layer should take, on a slice or a transposed view of its fused
    projection too. Autograd follows exactly: the rotation needs nothing of its input, and an act that
    does keeps a copy of it.

    Args: as of :func:`rotate`. No two elements of x may share memory, and under grad x must not come
    from chunk, split or unbind: slice instead.

    Returns:
        x itself.

    >>> from tightrope import RopeSpec
    >>> k = torch.randn(2, 8, 16, 64)
    >>> rotate_(k, RopeSpec(head_dim=64), 100) is k
    True
    """
    outer = calls.outer(act, gate, 1)
    calls.in_place(
        *(_X, x, None, spec, positions, layout, inverse, backend),
        *(inv_freq, seq_len, outer),
    )
    return x


@public("rotate_qk")
def rotate_qk(
    q: torch.Tensor,
    k: _K,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    act: ActLike = None,
    gate: GateLike = None,
    inverse: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys in one launch, with their angles computed once.

    Args:
        q, k: as x of :func:`rotate`; the same rows, tokens and dtype; any numbers of heads (GQA,
            MQA). k may be None.
        spec, positions, layout, inv_freq, seq_len, inverse, backend: as of :func:`rotate`. With frequencies
            per head q and k have the same number of them.
        act, gate: as of :func:`rotate`, or a pair, one for q and one for k. A gate for both is xPos's
            opposite for keys. Where the two differ in kind this is two launches.
        out: as of :func:`rotate`, a pair for q and k; None for a k that is None.

    Returns:
        Rotated q and k; None for a k that was None.

    >>> from tightrope import RopeSpec
    >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    >>> q, k = rotate_qk(q, k, RopeSpec(head_dim=64))
    """
    outs = None if out is None else [x for x in out if x is not None]
    names = _QK if k is not None else _Q
    outer = calls.outer(act, gate)
    ys = calls.out_of_place(
        *(names, q, k, spec, positions, layout, inverse, backend),
        *(outs, inv_freq, seq_len, False, outer),
    )
    return ys[0], cast(_K, None if k is None else ys[1])


@public("rotate_qk_")
def rotate_qk_(
    q: torch.Tensor,
    k: _K,
    spec: RopeSpec | PreparedRotation,
    positions: PositionsLike = None,
    *,
    layout: str = "bhsd",
    inv_freq: torch.Tensor | None = None,
    seq_len: SeqLen = None,
    act: ActLike = None,
    gate: GateLike = None,
    inverse: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys in place: :func:`rotate_qk` without new tensors.

    Args: as of :func:`rotate_qk`; q and k must not overlap in memory, but may be slices of one
    projection. Without grad this is one launch; under grad it is one for each.

    Returns:
        q and k themselves.

    >>> from tightrope import RopeSpec
    >>> qkv = torch.randn(1, 16, 3 * 8 * 64).unflatten(-1, (24, 64))
    >>> q, k = rotate_qk_(qkv[:, :, :8], qkv[:, :, 8:16], RopeSpec(head_dim=64), layout="bshd")
    """
    names = _QK if k is not None else _Q
    outer = calls.outer(act, gate)
    calls.in_place(
        *(names, q, k, spec, positions, layout, inverse, backend),
        *(inv_freq, seq_len, outer),
    )
    return q, k


@public("rerotate")
def rerotate(
    k: torch.Tensor,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    from_seq_len: SeqLen = None,
    to_seq_len: SeqLen = None,
    layout: str = "bhsd",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Move rotated keys to other positions, to other frequencies, or to both, in one pass.

    For caches: a context that shifts, a rule that depends on the length when the length has changed
    (dynamic NTK, LongRoPE), caches that are merged. The angle of each pair is the difference of the
    new and the old one, exact at any position, so one rounding is all that keys lose; where nothing
    changes, finite keys keep their bits (a zero may lose its sign). See docs/rerotate.md.

    Args:
        k: rotated keys, as x of :func:`rotate`.
        from_spec: what they were rotated by.
        to_spec: what they shall be rotated by; the same channels and pairing.
        positions: where they are, as of :func:`rotate`.
        new_positions: where they shall be; where they are if None.
        from_seq_len, to_seq_len: the lengths under which they were rotated and shall be, for rules
            that depend on it, as of :meth:`RopeSpec.at`; by default the last of the positions + 1.
        layout, out, backend: as of :func:`rotate`.

    Returns:
        ``out`` if given, else a new tensor. Differentiable by k and by floating positions.

    Raises:
        TypeError, ValueError: arguments that do not fit, each with its sentence.

    >>> from tightrope import RopeSpec
    >>> spec, k = RopeSpec(64), torch.randn(1, 2, 16, 64)
    >>> moved = rerotate(rotate(k, spec, 1000), spec, spec, 1000, 0)
    >>> torch.allclose(moved, rotate(k, spec), atol=1e-5)
    True
    """
    lengths = (from_seq_len, to_seq_len)
    rope = reangle.prepared(
        k, from_spec, to_spec, positions, new_positions, *lengths, layout_named(layout)
    )
    outs = None if out is None else [out]
    (y,) = calls.out_of_place(("k",), k, None, rope, None, layout, False, backend, outs)
    return y


@public("rerotate_")
def rerotate_(
    k: torch.Tensor,
    from_spec: RopeSpec,
    to_spec: RopeSpec,
    positions: PositionsLike = None,
    new_positions: PositionsLike = None,
    *,
    from_seq_len: SeqLen = None,
    to_seq_len: SeqLen = None,
    layout: str = "bhsd",
    backend: str | None = None,
) -> torch.Tensor:
    """:func:`rerotate` in place: the path for a cache, or for a slice of one.

    Args: as of :func:`rerotate`, and k as x of :func:`rotate_`.

    Returns:
        k itself.

    >>> from tightrope import RopeSpec
    >>> spec, cache = RopeSpec(64), torch.randn(1, 2, 100, 64)
    >>> kept = rerotate_(cache[:, :, 50:], spec, spec, 50, 0)
    """
    lengths = (from_seq_len, to_seq_len)
    rope = reangle.prepared(
        k, from_spec, to_spec, positions, new_positions, *lengths, layout_named(layout)
    )
    calls.in_place(("k",), k, None, rope, None, layout, False, backend)
    return k


@public("rotary_pos_embedding")
def rotary_pos_embedding(
    input_: torch.Tensor, position_ids: torch.Tensor | None = None, interleaved: bool = True
) -> torch.Tensor:
    """Rotary position embedding of the whole last dimension, with base 10000.

    Args:
        input_: floating, shape ``(..., seq_len, embed_dim)`` with any leading dimensions and an even
            ``embed_dim``.
        position_ids: shape ``(seq_len,)``, int32, int64, float32 or float64; 0..seq_len-1 if None.
        interleaved: pair channels (0, 1), (2, 3), … if true, and the first half with the second if
            false.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: an odd ``embed_dim``, fewer than two dimensions, or ids that do not fit.
        TypeError: an input or ids of a dtype that cannot rotate or count.

    Source: Su et al., RoFormer (arXiv 2104.09864), equations 15, 16 and 34.

    >>> rotary_pos_embedding(torch.randn(2, 12, 8, 64)).shape
    torch.Size([2, 12, 8, 64])
    """
    if not isinstance(input_, torch.Tensor):
        raise bad_type(f"input_ must be a tensor but got {describe(input_)}")
    if input_.dim() < 2:
        raise bad_value("input_ must have shape (..., seq_len, embed_dim)", input_=input_)
    *lead, tokens, width = input_.shape
    if width % 2:
        raise bad_value(f"embed_dim must be even but got {width}", input_=input_)
    if position_ids is not None and (
        not isinstance(position_ids, torch.Tensor) or position_ids.shape != (tokens,)
    ):
        raise bad_value(
            f"position_ids must have shape ({tokens},)", position_ids=position_ids, input_=input_
        )
    spec = RopeSpec(width, interleaved=interleaved)
    # No position differs between leading dimensions, so any of them may serve as rows and heads.
    layout = {0: "sd", 1: "bsd"}.get(len(lead), "bhsd")
    x = input_.flatten(0, len(lead) - 2) if len(lead) > 2 else input_
    (y,) = calls.out_of_place(("input_",), x, None, spec, position_ids, layout, False, None)
    return y.reshape(input_.shape)


@public("apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: _K,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    tables: str = "cat",
    start: int = 0,
    inverse: bool = False,
    position_ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate queries and keys by tables of cosines and sines: the field's usual signature.

    For code that has its tables already. :func:`rotate_qk` needs none, and is exact at any position.

    Args:
        q, k: floating, as of :func:`rotate_qk`; four dimensions, or three without a batch or heads.
            k may be None.
        cos, sin: float32, float64, bfloat16 or float16, on the device of q: ``(tokens, width)``,
            ``(rows, tokens, width)``, or with as many dimensions as q. Channels past what the tables
            rotate pass.
        unsqueeze_dim: where the heads of q are: 1 for (batch, heads, seq, dim), 2 for
            (batch, seq, heads, dim).
        interleaved: pair channels (0, 1), (2, 3), … instead of halves.
        tables: how the width holds the pairs: "cat", halves duplicated; "repeat", pairs duplicated;
            "half", one entry per pair. Of duplicates the first is read; tables whose last row holds
            others are refused, unless they require grad, or are on a device or traced.
        start: the first channel that rotates.
        inverse: rotate by the negative angles. Lengths in the tables multiply, as they do forward.
        position_ids: int32 or int64 ``(tokens,)`` or ``(rows, tokens)``: which rows of the tables.
        backend: as of :func:`rotate`.

    Returns:
        Rotated q and k. Differentiable by q, k, cos and sin.

    Raises:
        IndexError: ids outside the tables, on the CPU. Where a look would cost a synchronisation, or
            in compiled code, such tokens become NaN.
        TypeError, ValueError: arguments that do not fit, each with its sentence.

    Source: the formula of Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
    >>> angle = torch.arange(16.0)[:, None] * torch.ones(64)
    >>> q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    """
    arguments = given_tables.arguments(
        q, k, cos, sin, unsqueeze_dim, position_ids, interleaved, tables, start, inverse
    )
    ys = calls.run(q, k, arguments, backend)
    return ys[0], cast(_K, None if k is None else ys[1])


@public("apply_rotary_pos_emb_")
def apply_rotary_pos_emb_(
    q: torch.Tensor,
    k: _K,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    tables: str = "cat",
    start: int = 0,
    inverse: bool = False,
    position_ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, _K]:
    """Rotate in place: :func:`apply_rotary_pos_emb` without new tensors.

    Args: as of :func:`apply_rotary_pos_emb`, and q and k as of :func:`rotate_qk_`.

    Returns:
        q and k themselves.

    >>> q, angle = torch.randn(1, 8, 16, 64), torch.zeros(16, 64)
    >>> apply_rotary_pos_emb_(q, None, angle.cos(), angle.sin())[0] is q
    True
    """
    names = _QK if k is not None else _Q
    arguments = given_tables.arguments(
        q, k, cos, sin, unsqueeze_dim, position_ids, interleaved, tables, start, inverse
    )
    calls.run_in_place(names, q, k, arguments, backend)
    return q, k


@public("build_freqs_cis")
def build_freqs_cis(
    seq_len: int,
    d: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of cosines and sines of positions 0..seq_len-1, one entry per pair.

    For :func:`rotary_apply`, and for code that wants to see them: nothing else here needs tables.

    Args:
        seq_len: how many positions.
        d: channels of a head; even.
        base: base of the frequencies.
        dtype: float32 or float64. Entries are exact to 1.2e-7, or 1e-12, at any position.
        device: where the tables shall be; by default where torch makes new tensors.

    Returns:
        Cosines and sines, ``(seq_len, d / 2)``.

    Raises:
        TypeError, ValueError: a length or a width that cannot be.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    >>> cos, sin = build_freqs_cis(16, 64)
    >>> cos.shape
    torch.Size([16, 32])
    """
    seq_len, d = integer("seq_len", seq_len), integer("d", d)
    for what, size in (("seq_len", seq_len), ("d", d)):
        if size < 0:
            raise bad_value(f"{what} must not be negative but got {size}")
    if isinstance(d, int) and d % 2:
        raise bad_value(f"d must be even but got {d}")
    if dtype not in (torch.float32, torch.float64):
        raise bad_type(f"dtype must be float32 or float64 but got {dtype}")
    # As torch's own factories: a device that somebody set as the default is heeded.
    device = torch.empty(0).device if device is None else device
    # Under dynamic=True the default of a function is a symbol, of which no frequencies can be made.
    spec = RopeSpec(d) if base == 10000.0 else RopeSpec(d, base)
    rotation = spec.at(None, device)
    phase = angles.phases(rotation.words, rotation.turns, None, 0, True, seq_len)
    cos, sin = angles.cos_sin(phase, dtype)
    return cos[0, 0], sin[0, 0]


@public("rotary_apply")
def rotary_apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs (0, 1), (2, 3), … by tables that broadcast against x.

    Args:
        x: floating ``(..., d)``, d even: ``(batch, heads, seq, d)`` usually.
        cos, sin: floating, of one shape that broadcasts against ``(..., d / 2)``, such as
            ``(seq, d / 2)`` or ``(1, 1, seq, d / 2)``.

    Returns:
        A new tensor of the broadcast shape and the dtype of x. Differentiable by x, cos and sin.

    Raises:
        TypeError, ValueError: tensors that do not fit, each with its sentence.

    Source: the formula of Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> x = torch.randn(2, 8, 16, 64)
    >>> rotary_apply(x, *build_freqs_cis(16, 64)).shape
    torch.Size([2, 8, 16, 64])
    """
    x, cos, sin, shape = _against(x, cos, sin)
    arguments = given_tables.arguments(x, None, cos, sin, 1, None, True, "half")
    (y,) = calls.run(x, None, arguments, None)
    return y.reshape(shape)


@public("polar_scan")
def polar_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: RopeSpec | PreparedRotation,
    log_decay: torch.Tensor | float | None = None,
    positions: PositionsLike = None,
    *,
    gate: Gate | tuple[Gate | None, Gate | None] | None = None,
    state: scan.PolarState | None = None,
    form: str = "chunked",
    chunk: int = 128,
    layout: str = "bhsd",
    seq_len: SeqLen = None,
) -> tuple[torch.Tensor, scan.PolarState]:
    """Causal attention without softmax, as a gated recurrence in linear time and memory.

    With R the rotation, P the gates and G the running sum of ``log_decay``::

        o_t = Σ_{i<=t} score(t, i) · v_i
        score(t, i) = (P_t R_t q_t)ᵀ diag(exp(G_t − G_i)) (P_i R_i k_i)

    Scores are not scaled: scale q. A decay, or a gate, that gives both channels of a pair one value
    commutes with the rotation, and then scores depend on the distance only.

    Args:
        q, k: as of :func:`rotate_qk`; the heads of q a multiple of those of k.
        v: as k; heads of v may have any number of channels.
        spec, positions, seq_len: as of :func:`rotate`. Positions continue those of ``state``.
        log_decay: logarithms <= 0 of what memory is multiplied by at each token: None, a number, or
            a floating tensor ``()``, ``(kv_heads|1, channels|1)`` or ``(batch|1, kv_heads|1,
            tokens|1, channels|1)``, whatever the layout. −∞ forgets all before the token.
        gate: a gate of :mod:`tightrope.gates` for q and k, or one for each.
        state: what the call on the tokens before returned; nothing before these if None.
        form: "chunked" for training; "step", one token after the other, for decoding; "quadratic",
            the definition, in memory that grows with the square of the tokens.
        chunk: how many tokens lie between two states that the chunked form keeps for the backward
            pass. It changes memory and time, not the result.
        layout: "bhsd", "bshd" or "sbhd".

    Returns:
        The outputs, shaped as q with the channels of v, in the dtype of q; and the state after the
        last token, float32 (float64 for float64). Differentiable by q, k, v, log_decay, the tensors
        of gates and the state. ``torch.autocast`` changes neither, as long as ``backward`` is called
        outside of it: what goes in may be 16 bits wide, the memory never is.

    Raises:
        TypeError, ValueError: arguments that do not fit, each with its sentence.

    Source: chunks of a gated recurrence: Yang et al., Gated Linear Attention (arXiv 2312.06635),
    section 4; rotated: Sun et al., Retentive Network (arXiv 2307.08621), section 2.1.

    >>> from tightrope import RopeSpec
    >>> q, k, v = torch.randn(3, 1, 8, 16, 64).unbind()
    >>> spec, decay = RopeSpec(64, interleaved=True), torch.full((8, 1), -0.1)
    >>> o, state = polar_scan(q, k, v, spec, decay)
    >>> one, state = polar_scan(q[:, :, :1], k[:, :, :1], v[:, :, :1], spec, decay, state=state)
    >>> one.shape, state.tokens
    (torch.Size([1, 8, 1, 64]), 17)
    """
    if form not in scan.FORMS:
        raise bad_value(f"form must be one of {', '.join(scan.FORMS)} but got {form!r}")
    chunk = integer("chunk", chunk)
    if chunk < 1:
        raise bad_value(f"chunk must be positive but got {chunk}")
    where = layout_named(layout)
    if where.dims != 4:
        raise bad_value(f"layout must be one of bhsd, bshd, sbhd but got {layout!r}")
    if not isinstance(k, torch.Tensor):
        raise bad_type(f"k must be a tensor but got {describe(k)}")
    scan.check_state(state)
    if state is not None and isinstance(spec, RopeSpec):
        if spec.by_length and seq_len is None:
            raise bad_value(
                "seq_len must be given with a state, and be the same for all calls, where the "
                "frequencies depend on the length",
                spec=spec,
            )
        positions = state.tokens if positions is None else positions
    given_q, given_k = q, k
    if isinstance(q, torch.Tensor) and q.dtype in (torch.bfloat16, torch.float16):
        # In 16 bits rotated queries and keys would be rounded before sums that cancel.
        spec = prepare(_QK, (q, k), spec, positions, seq_len, where)
        q, k, positions, seq_len = q.float(), k.float(), None, None
    q, k = calls.out_of_place(
        *(_QK, q, k, spec, positions, layout, False, None),
        *(None, None, seq_len, False, calls.outer(None, gate)),
    )
    given_q, given_k = where.to_bhsd(given_q), where.to_bhsd(given_k)
    v = scan.values_of(given_q, given_k, v, where.to_bhsd)
    q, k = where.to_bhsd(q), where.to_bhsd(k)
    out, state = scan.run(q, k, v, log_decay, state, form, chunk)
    return where.from_bhsd(out), state


def rotate_first(
    x: torch.Tensor,
    spec: RopeSpec,
    positions: PositionsLike,
    *,
    layout: str,
    inverse: bool,
) -> torch.Tensor:
    """:func:`rotate` of a tensor that may have more channels than its spec: the rest are copied.

    For modules, which learn the width of their input when they see it.

    Args:
        x, spec, positions, layout, inverse: as of :func:`rotate`.

    >>> rotate_first(torch.ones(3, 8), RopeSpec(4), 1, layout="sd", inverse=False)[0, 4:]
    tensor([1., 1., 1., 1.])
    """
    (y,) = calls.out_of_place(_X, x, None, spec, positions, layout, inverse, None, wider=True)
    return y


def _against(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    """Broadcast x and tables of its pairs.

    Returns:
        x of four dimensions, tables of four that fit it, and the shape of the result.
    """
    for name, value in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(name, value)
    width = x.shape[-1] if x.dim() else 1
    if width % 2:
        raise bad_value(f"x must have an even last dimension but got {width}", x=x)
    lead: torch.Size | None = None
    if cos.dim() and cos.shape == sin.shape and cos.shape[-1] == width // 2:
        try:
            lead = torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1])
        except RuntimeError:
            pass
    if lead is None:
        raise bad_value(
            f"cos and sin must share a shape that broadcasts against x, with {width // 2} "
            "channels, one for each pair",
            x=x,
            cos=cos,
            sin=sin,
        )
    shape = torch.Size((*lead, width))
    tokens = lead[-1] if lead else 1

    def four(value: torch.Tensor, full: bool) -> torch.Tensor:
        # Dimensions of size 1 in front, then what is too many becomes rows.
        missing = max(len(lead), 3) + 1 - value.dim()
        value = value[(None,) * missing]
        front = lead[:-3] if len(lead) > 3 else ()
        if len(front) and (full or any(size != 1 for size in value.shape[: len(front) + 1])):
            value = value.expand(*lead[:-2], *value.shape[-3:])
        value = value.flatten(0, value.dim() - 4)
        return value.expand(*value.shape[:2], tokens, value.shape[3])

    if len(lead) <= 3:
        x = x.expand(shape)
    return four(x, True), four(cos, False), four(sin, False), shape
