"""Polar attention: queries and keys are rotated by position and scaled by a positive gate."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from .. import functional, gates as gates_
from .._errors import (
    bad_type,
    bad_value,
    check_flag,
    check_place,
    check_type,
    describe,
    public,
    real,
)
from ..channels import Channels
from ..gates import Exp, Gate, Slope
from ..ops.build import Stages
from ..ops.checks import check_count, check_dtype
from ..positions import PositionsLike
from ..spec import PreparedRotation, RopeSpec
from .rotary import prepared_by

GateOption: TypeAlias = str | Gate | tuple[Gate | None, Gate | None] | None


class KVCache:
    """Cache of keys (rotated and gated) and values of the tokens so far, for decoding.

    Attributes:
        k, v: ``(batch, kv_heads, tokens, d_head)``; None before the first token.

    >>> KVCache().tokens
    0
    """

    def __init__(self) -> None:
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Number of cached tokens."""
        return 0 if self.k is None else self.k.shape[2]

    def append_(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens, ``[rows, heads, tokens, channels]``, and return all of them."""
        self.k, self.v = self.followed_by(k, v)
        return self.k, self.v

    def followed_by(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached and the new keys and values, without storing the new ones."""
        if self.k is None and self.v is None:
            return k, v
        return torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)  # type: ignore[arg-type]


class _QueryHead(torch.nn.Module):
    """Query parameters of a head: all that a head needs if it uses the keys of another head."""

    gamma: torch.Tensor
    slope: torch.Tensor

    def __init__(
        self, d_model: int, d_head: int, use_spd: bool, tied: str | None, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        self.use_spd = use_spd
        self.tied = tied
        self.q_proj = torch.nn.Linear(d_model, d_head, bias=False, **factory)


class PolarRoPEHead(_QueryHead):
    """One head of non-causal polar attention: rotation by tables and a gate exp(γ) per channel.

    Args:
        d_model: channels of the input.
        d_head: channels of the head; even.
        use_spd: whether the head has a gate; γ is initialised to 0, which makes the gate 1.
        tied: "pair" gives both channels of a pair the same γ, so scores depend on distances only.
        device, dtype: device and dtype of the parameters.

    Source: RoFormer (arXiv 2104.09864) for the rotation. Every invertible matrix is a rotation or reflection times a positive
    definite one (the polar decomposition); here the first is RoPE, and the second the diagonal gate, see docs/learned.md.

    >>> head = PolarRoPEHead(32, 8)
    >>> head(torch.randn(2, 5, 32), *functional.build_freqs_cis(5, 8)).shape
    torch.Size([2, 5, 8])
    """

    @public("PolarRoPEHead")
    def __init__(
        self,
        d_model: int,
        d_head: int,
        use_spd: bool = True,
        *,
        tied: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_options(d_model, d_head, use_spd, tied, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(d_model, d_head, use_spd, tied, factory)
        self.k_proj = torch.nn.Linear(d_model, d_head, bias=False, **factory)
        self.v_proj = torch.nn.Linear(d_model, d_head, bias=False, **factory)
        if use_spd:
            width = d_head if tied is None else d_head // 2
            self.gamma = torch.nn.Parameter(torch.zeros(width, **factory))

    @public()
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend over the tokens of x.

        Args:
            x: ``(batch, tokens, d_model)``.
            cos, sin: ``(tokens, d_head / 2)``, see :func:`functional.build_freqs_cis`.

        Returns:
            ``(batch, tokens, d_head)``.
        """
        width = self.q_proj.out_features
        _check_input(x, self.q_proj.weight)
        want = (x.shape[1], width // 2)
        if any(not isinstance(t, torch.Tensor) or t.shape != want for t in (cos, sin)):
            raise bad_value(f"cos and sin must have shape {want}", x=x, cos=cos, sin=sin)
        q, k, v = (each(x)[:, None] for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = functional.rotary_apply(q, cos, sin), functional.rotary_apply(k, cos, sin)
        if self.use_spd:
            gate, channels = Exp(self.gamma, self.tied), Channels(width, 0, width, True)
            q, k = ((x * gate.factor(channels, dtype=x.dtype)).to(x.dtype) for x in (q, k))
        return scaled_dot_product_attention(q, k, v)[:, 0]


class PolarRoPEAttention(torch.nn.Module):
    """Multi-head polar attention: softmax attention with rotated and gated queries and keys.

    Parameters are stored per head, ``heads.{i}.q_proj.weight``, ``heads.{i}.gamma``, and
    ``out.weight``; the projections of all heads are computed as one product. Only the weights of
    ``q_proj``, ``k_proj`` and ``v_proj`` are read: hooks on these modules, or modules put in their
    place, are not called.

    Args:
        d_model: channels of the input and of the output.
        num_heads: number of heads.
        d_head: channels of each head; even.
        use_spd: whether each head has a gate exp(γ) per channel; γ, ``heads.{i}.gamma``, is
            initialised to 0.
        num_kv_heads: number of groups of heads that share keys and values; the first head of a group
            has the projections and the gate of the group's keys and values. ``num_heads`` by default.
        causal: whether a token attends only to itself and to earlier tokens; False by default.
        dropout: fraction of attention weights dropped in training.
        spec: the rotation; by default interleaved, over all channels, with base 10000.
        gate: an additional gate on queries and keys: None; "slope", the factor exp(slope · p) with a
            learnable ``heads.{i}.slope``, initialised to 0; a gate of :mod:`tightrope.gates`; or a
            pair, one for queries and one for keys. The tensors of a gate given as an object are not
            parameters of this module.
        tied: "pair" gives γ and slope one value per rotated pair, so that they commute with the
            rotation.
        device, dtype: device and dtype of the parameters.

    Raises:
        TypeError, ValueError: invalid options; the message names the option.

    Source: see :class:`PolarRoPEHead`; grouped heads: Ainslie et al. (arXiv 2305.13245).

    >>> attention = PolarRoPEAttention(32, 4, 8)
    >>> attention(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    @public()
    def __init__(  # noqa: PLR0913  (one argument for each option)
        self,
        d_model: int,
        num_heads: int,
        d_head: int,
        use_spd: bool = True,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        spec: RopeSpec | None = None,
        gate: GateOption = None,
        tied: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_options(d_model, d_head, use_spd, tied, dtype)
        check_flag("causal", causal)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_count("num_heads", num_heads)
        check_count("num_kv_heads", kv_heads)
        if num_heads % kv_heads:
            raise bad_value(
                "num_heads must be a positive multiple of num_kv_heads but got "
                f"{num_heads} and {kv_heads}"
            )
        if spec is None:
            spec = RopeSpec(d_head, interleaved=True)
        elif not isinstance(spec, RopeSpec) or spec.head_dim != d_head:
            raise bad_value(f"spec must be a RopeSpec with head_dim={d_head} but got {spec!r}")
        if isinstance(gate, str) and gate != "slope":
            raise bad_value(
                f"gate must be None, 'slope' or a gate of tightrope.gates but got {gate!r}"
            )
        if not 0.0 <= real("dropout", dropout) < 1.0:
            raise bad_value(f"dropout must lie in [0, 1) but got {dropout}")
        self.spec = spec
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, kv_heads
        self.d_head, self.use_spd, self.causal = d_head, use_spd, causal
        self.dropout, self.tied = dropout, tied
        self.has_slope = gate == "slope"
        self._gates = (None, None) if isinstance(gate, str) else gates_.pair(gate)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = d_head if tied is None else spec.rotary_dim // 2
        self.heads = torch.nn.ModuleList()
        for i in range(num_heads):
            # Create parameters in the order of the project's first version, so that the same random
            # seed gives the same values.
            head: _QueryHead
            if i % (num_heads // kv_heads):
                head = _QueryHead(d_model, d_head, use_spd, tied, factory)
            else:
                head = PolarRoPEHead(d_model, d_head, use_spd, tied=tied, **factory)
            if use_spd:
                head.gamma = torch.nn.Parameter(torch.zeros(width, **factory))
            if self.has_slope:
                head.slope = torch.nn.Parameter(torch.zeros(width, **factory))
            self.heads.append(head)
        self.out = torch.nn.Linear(num_heads * d_head, d_model, bias=False, **factory)

    @public()
    def forward(
        self,
        x: torch.Tensor,
        *,
        positions: PositionsLike | PreparedRotation = None,
        attn_mask: torch.Tensor | None = None,
        gate: Gate | tuple[Gate | None, Gate | None] | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Attend over the tokens of x and of the cache.

        Args:
            x: ``(batch, tokens, d_model)``.
            positions: positions of the tokens, see :meth:`tightrope.RopeSpec.at`, or the rotation
                that it returns; by default they continue from the tokens of the cache.
            attn_mask: ``(tokens, keys)`` or ``(batch|1, heads|1, tokens|1, keys)``, with the keys of
                the cache before those of x: bool, true where a token may attend, or floating, added
                to the scores. For keys that are padding, give ``is_token[:, None, None]``. The output
                of a token that may not attend to any key by a bool mask is 0.
            gate: an additional gate for this call, such as a :class:`tightrope.gates.Given` for its
                tokens.
            cache: the preceding tokens; the call appends those of x. Needs ``causal``, and a spec
                whose frequencies do not depend on the length.

        Returns:
            ``(batch, tokens, d_model)``.

        Raises:
            TypeError, ValueError: invalid arguments; the message names the argument.
        """
        _check_input(x, self._all_heads()[0].q_proj.weight)
        q, k, v = self._project(x)
        if cache is not None:
            self._check_cache(cache)
            if positions is None:
                positions = cache.tokens
        rope: RopeSpec | PreparedRotation = self.spec
        where: PositionsLike = None
        if isinstance(positions, PreparedRotation):
            rope = prepared_by(self.spec, positions)
        else:
            where = positions
        gates = self._all_gates(gate)
        fused = Stages((None, None), gates) if any(gates) else None
        # In place is safe: the projections are used nowhere else.
        verb = "new" if torch.is_grad_enabled() else "in place"
        q, k = functional.rotate_with(("q", "k"), verb, q, k, rope, where, "bhsd", False, fused)
        if cache is not None:
            k, v = cache.followed_by(k, v)
        mask, is_causal = self._mask(q, k, attn_mask)
        y = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.spec.softmax_scaling / math.sqrt(self.d_head),
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        if cache is not None:
            # Last, so that a call that raises leaves the cache unchanged.
            cache.k, cache.v = k, v
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project to queries, keys and values ``(batch, heads, tokens, d_head)`` in one product."""
        firsts = self._kv_heads()
        weight = torch.cat(
            [
                *(head.q_proj.weight for head in self._all_heads()),
                *(head.k_proj.weight for head in firsts),
                *(head.v_proj.weight for head in firsts),
            ]
        )
        every = linear(x, weight).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
        ends = self.num_heads, self.num_heads + self.num_kv_heads
        return every[:, : ends[0]], every[:, ends[0] : ends[1]], every[:, ends[1] :]

    def _all_heads(self) -> list[Any]:
        return list(self.heads)

    def _kv_heads(self) -> list[Any]:
        """Return the heads that have keys and values, the first of each group."""
        return self._all_heads()[:: self.num_heads // self.num_kv_heads]

    def _all_gates(self, gate: Any) -> tuple[list[Gate], list[Gate]]:
        """Return the gates of the queries and the gates of the keys."""
        for_q, for_k = ([own, extra] for own, extra in zip(self._gates, gates_.pair(gate)))
        for heads, gates in ((self._all_heads(), for_q), (self._kv_heads(), for_k)):
            if self.use_spd:
                gates.append(Exp(torch.stack([head.gamma for head in heads]), self.tied))
            if self.has_slope:
                gates.append(Slope(torch.stack([head.slope for head in heads]), self.tied))
        return [one for one in for_q if one], [one for one in for_k if one]

    def _mask(
        self, q: torch.Tensor, k: torch.Tensor, given: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, bool]:
        """Return ``attn_mask`` and ``is_causal`` for torch's attention."""
        rows, heads, tokens, _ = q.shape
        keys = k.shape[2]
        if given is None and (not self.causal or keys == tokens):
            return None, self.causal
        mask = None
        if self.causal:
            square = torch.ones(tokens, keys, dtype=torch.bool, device=q.device)
            mask = square.tril(keys - tokens)
        if given is None:
            return mask, False
        _check_mask(given, (rows, heads, tokens, keys))
        check_place("attn_mask", given, "x is", q.device)
        if given.dtype == torch.bool:
            return given if mask is None else mask & given, False
        added = given.to(q.dtype)
        return added if mask is None else added.masked_fill(~mask, -torch.inf), False

    def _check_cache(self, cache: object) -> None:
        """Refuse a cache that this module cannot have; torch refuses keys and values that do not fit."""
        if not isinstance(cache, KVCache):
            raise bad_type(f"cache must be a KVCache but got {describe(cache)}")
        if not self.causal:
            raise bad_value(
                "causal must be True with a cache: cached tokens cannot attend to later ones"
            )
        if self.spec.by_length:
            raise bad_value(
                "cache must be None if the frequencies depend on the length, because its keys "
                "were rotated for a shorter length",
                spec=self.spec,
            )

    def extra_repr(self) -> str:
        """Return the arguments shown in the repr."""
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, d_head={self.d_head}, "
            f"use_spd={self.use_spd}, num_kv_heads={self.num_kv_heads}, causal={self.causal}"
        )


def _check_options(
    d_model: object,
    d_head: Any,
    use_spd: object,
    tied: object,
    dtype: object,
) -> None:
    check_count("d_model", d_model)
    check_count("d_head", d_head)
    if d_head % 2:
        raise bad_value(f"d_head must be even but got {d_head}")
    check_flag("use_spd", use_spd)
    if tied not in (None, "pair"):
        raise bad_value(f"tied must be None or 'pair' but got {tied!r}")
    check_dtype(dtype)


def _check_input(x: torch.Tensor, weight: torch.Tensor) -> None:
    width = weight.shape[1]
    check_type("x", x)
    if x.dim() != 3 or x.shape[-1] != width:
        raise bad_value(f"x must have shape (batch, tokens, {width})", x=x)
    # torch silently accepts a meta tensor (which has no data) here.
    check_place("x", x, "the parameters are", weight.device)


def _check_mask(mask: object, full: tuple[int, int, int, int]) -> None:
    rows, heads, tokens, keys = full
    if not isinstance(mask, torch.Tensor) or not (
        mask.dtype == torch.bool or mask.is_floating_point()
    ):
        raise bad_type(f"attn_mask must be a bool or floating tensor but got {describe(mask)}")
    shape = mask.shape if mask.dim() == 4 else (1, 1, *mask.shape)
    fits = len(shape) == 4 and all(
        own == size or (own == 1 and axis != 3) for axis, (own, size) in enumerate(zip(shape, full))
    )
    if not fits:
        raise bad_value(
            f"attn_mask must have shape ({tokens}, {keys}) or ({rows}|1, {heads}|1, {tokens}|1, "
            f"{keys})",
            attn_mask=mask,
        )
