"""Rotation by running sums of angles that a layer computes from its input, and attention with it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid, scaled_dot_product_attention, silu

from .. import functional, phases
from .._errors import as_real, bad_type, bad_value, describe, integer, public
from ..frequencies import Given
from ..functional.scan import PolarState
from ..ops.checks import check_count, check_dtype, check_flag
from ..phases import Phases, PhaseState
from ..phases._phases import starts_of
from ..spec import RopeSpec
from . import _invariant
from .polar import KVCache, _check_input

_BOUNDS = ("temperature", "tanh", None)
_FORMS = ("scan", "softmax")


class SelectiveState(NamedTuple):
    """The state of :class:`SelectiveRotary` after the last token.

    Attributes:
        phases: the state of the running sums.
        recent: the projected inputs that the convolution still reads, ``(batch, conv - 1, channels)``;
            0 where there are none. float64 for float64 input, otherwise float32.
    """

    phases: PhaseState
    recent: torch.Tensor

    def detached(self) -> SelectiveState:
        """Return the state without gradients to earlier calls, for truncated backpropagation."""
        return SelectiveState(self.phases.detached(), self.recent.detach())


class SelectiveRotary(torch.nn.Module):
    """Phases of tokens as running sums of increments that are computed from the tokens.

    With z = conv(W x), the increment of token t, head h and pair k, in radians, is

    - ``bound="temperature"``: τ[k] · z[t, h, k], for x divided by its norm (Selective RoPE);
    - ``bound=None``: z[t, h, k], for x divided by its norm;
    - ``bound="tanh"``: π · tanh(z[t, k]) · softplus(V x[t] + b)[h] (Mamba-3, which has no convolution).

    With ``gate`` each is multiplied by sigmoid(U x[t] + c)[h]. Selective RoPE divides each head's share
    of x by its norm; here it is all of x.

    Equal inputs give equal phases, bit for bit, in a prefill, in chunks and token by token. For that,
    increments are computed in float64, from channels that are rounded to about 20 bits below the largest
    channel of their token, and weights likewise; then they are rounded to float32 (float64 for float64
    input). With parameters in 16 bits the same holds, but they are rounded themselves: an increment of
    1 radian is then off by up to 2^-9, which adds up over tokens. Keep this module in float32 or wider.

    Args:
        d_model: channels of the input.
        num_heads: number of heads.
        pairs: rotated channel pairs of a head.
        conv: kernel size of a causal convolution over tokens, separate for each channel, initialised
            to the identity; 0 for none.
        rank: rank of W; None for a full matrix.
        bound: the formula, see above.
        gate: whether increments have a gate per head.
        base: the initial temperature of pair k is τ[k] = base^(-k / pairs); positive.
        device, dtype: device and dtype of the parameters; a device with float64.

    Attributes:
        temperature: τ, a parameter ``(pairs,)``; None for the other formulas.

    Raises:
        TypeError, ValueError: invalid options; the message names the option.

    Sources: Selective RoPE (arXiv 2511.17388); Mamba-3 (arXiv 2603.15569).

    >>> rotary = SelectiveRotary(32, num_heads=4, pairs=8)
    >>> phases, state = rotary(torch.randn(2, 5, 32))
    >>> phases.shape
    torch.Size([2, 4, 5, 8])
    >>> phases, state = rotary(torch.randn(2, 1, 32), state)  # the next token
    """

    @public()
    def __init__(  # noqa: PLR0913  (one argument for each option)
        self,
        d_model: int,
        num_heads: int,
        pairs: int,
        *,
        conv: int = 4,
        rank: int | None = None,
        bound: str | None = "temperature",
        gate: bool = False,
        base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("num_heads", num_heads), ("pairs", pairs)):
            check_count(name, value)
        if rank is not None:
            check_count("rank", rank)
        if integer("conv", conv) < 0:
            raise bad_value(f"conv must be at least 0 but got {conv}")
        if bound not in _BOUNDS:
            raise bad_value(f"bound must be 'temperature', 'tanh' or None but got {bound!r}")
        check_flag("gate", gate)
        real = as_real(base)
        if real is None or not 0 < real < math.inf:
            raise bad_value(f"base must be a positive number but got {base!r}")
        check_dtype(dtype)
        self.d_model, self.num_heads, self.pairs = d_model, num_heads, pairs
        self.conv, self.rank, self.bound, self.base = conv, rank, bound, real
        heads = 1 if bound == "tanh" else num_heads

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight = parameter(heads * pairs, d_model if rank is None else rank)
        self.down = None if rank is None else parameter(rank, d_model)
        self.kernel = parameter(conv, heads * pairs) if conv else None
        self.temperature = parameter(pairs) if bound == "temperature" else None
        of_heads = (num_heads, d_model), (num_heads,)
        self.step_weight, self.step_bias = (
            parameter(*shape) if bound == "tanh" else None for shape in of_heads
        )
        self.gate_weight, self.gate_bias = (
            parameter(*shape) if gate else None for shape in of_heads
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to their initial values, for example after ``to_empty``."""
        first = self.weight if self.down is None else self.down
        first.normal_(std=self.d_model**-0.5 if self.bound == "tanh" else 1.0)
        if self.rank is not None:
            self.weight.normal_(std=self.rank**-0.5)
        if self.kernel is not None:
            self.kernel.zero_()
            self.kernel[0] = 1.0
        if self.temperature is not None:
            steps = torch.arange(self.pairs, dtype=torch.float64) / self.pairs
            self.temperature.copy_(self.base**-steps)
        for weight, bias in (
            (self.step_weight, self.step_bias),
            (self.gate_weight, self.gate_bias),
        ):
            if weight is not None and bias is not None:
                weight.normal_(std=self.d_model**-0.5)
                bias.zero_()

    @public()
    def forward(
        self,
        x: torch.Tensor,
        state: SelectiveState | None = None,
        reset: torch.Tensor | None = None,
    ) -> tuple[Phases, SelectiveState]:
        """Return the phases of tokens, and the state after the last one.

        Args:
            x: ``(batch, tokens, d_model)``, floating.
            state: the state after the preceding tokens; None to start.
            reset: where a new sequence starts, see :func:`tightrope.phases.running`. The convolution
                does not read tokens of another sequence.

        Returns:
            Phases ``(batch, num_heads, tokens, pairs)``, differentiable with respect to x, the
            parameters and the state.

        Raises:
            TypeError, ValueError: invalid arguments; the message names the argument.
        """
        increments, recent = self.increments(x, state, reset)
        made = phases.running(increments, None if state is None else state.phases, reset)
        assert made.state is not None  # noqa: S101  (running sums have a state)
        return made, SelectiveState(made.state, recent)

    @public()
    def increments(
        self,
        x: torch.Tensor,
        state: SelectiveState | None = None,
        reset: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the increments of tokens in radians, and ``recent`` of the next state.

        Args: see :meth:`forward`.

        Returns:
            ``(batch, num_heads, tokens, pairs)``, float64 for float64 x, otherwise float32.
        """
        _check_input(x, self.weight if self.down is None else self.down)
        if state is not None and not isinstance(state, SelectiveState):
            raise bad_type(f"state must be None or a SelectiveState but got {describe(state)}")
        starts = None if reset is None else starts_of(x[:, None], reset)
        if starts is not None and starts.shape[0] not in (1, x.shape[0]):
            raise bad_value(f"reset must have 1 or {x.shape[0]} rows", reset=reset)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        seen = _invariant.rounded(x)
        size: torch.Tensor | float = 1.0 if self.bound == "tanh" else _invariant.norm(seen)
        if self.down is None:
            z = _invariant.linear(seen, self.weight) / size
        else:
            z = _invariant.linear(seen, self.down) / size
            z = _invariant.linear(_invariant.rounded(z), self.weight)
        z, recent = self._mixed(z.to(dtype), None if state is None else state.recent, starts)
        z = z.unflatten(-1, (-1, self.pairs)).transpose(1, 2)
        if self.step_weight is not None and self.step_bias is not None:
            step = _invariant.linear(seen, self.step_weight) + self.step_bias.to(z)
            step = _invariant.softplus(step).mT[..., None]
            z = math.pi * _invariant.tanh(z) * step
        if self.temperature is not None:
            z = z * self.temperature.to(z)
        if self.gate_weight is not None and self.gate_bias is not None:
            opened = _invariant.linear(seen, self.gate_weight) / size + self.gate_bias.to(z)
            z = z * _invariant.sigmoid(opened).mT[..., None]
        return z.to(dtype), recent

    def _mixed(
        self, z: torch.Tensor, recent: torch.Tensor | None, starts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve over tokens ``(batch, tokens, channels)`` in float64, within sequences."""
        rows, tokens, channels = z.shape
        held = max(self.conv - 1, 0)
        if recent is None:
            recent = z.new_zeros(rows, held, channels)
        elif recent.shape != (rows, held, channels) or recent.dtype != z.dtype:
            raise bad_value(
                f"state must hold recent inputs {str(z.dtype).removeprefix('torch.')}"
                f"[{rows}, {held}, {channels}] for this x",
                recent=recent,
            )
        if self.kernel is None:
            return z.double(), recent
        line = torch.cat((recent, z), 1)
        later = line[:, tokens:]
        at = torch.arange(tokens, device=z.device)
        first = None
        if starts is not None and tokens:
            # The start of each token's sequence; far enough back if it is in an earlier call.
            first = torch.where(starts, at, -self.conv).cummax(1).values[..., None]
            ends = at.new_tensor(range(tokens - held, tokens))[:, None]
            later = later.masked_fill(ends < first[:, -1:], 0.0)
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        for lag in range(self.conv):
            part = line[:, held - lag : held - lag + tokens]
            if first is not None:
                part = part.masked_fill(at[:, None] - lag < first, 0.0)
            total = total + part.double() * self.kernel[lag].double()
        return total, later

    def extra_repr(self) -> str:
        """Return the arguments shown in the repr."""
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, pairs={self.pairs}, "
            f"conv={self.conv}, rank={self.rank}, bound={self.bound!r}, "
            f"gate={self.gate_weight is not None}"
        )


class SelectiveCache:
    """Cache of the tokens so far, for decoding with :class:`SelectiveAttention`.

    Attributes:
        rotary: the state of the rotation; None before the first token.
        memory: the state of the scan; None before the first token, and for softmax.
        kv: rotated keys, and values, of all tokens; empty for the scan.

    >>> SelectiveCache().kv.tokens
    0
    """

    def __init__(self) -> None:
        self.rotary: SelectiveState | None = None
        self.memory: PolarState | None = None
        self.kv = KVCache()


class SelectiveAttention(torch.nn.Module):
    """Causal attention whose queries and keys rotate by running sums of angles from the input.

    Args:
        d_model: channels of the input and of the output.
        num_heads: number of heads.
        d_head: channels of each head; even.
        form: "scan", attention without softmax in linear time, see
            :func:`tightrope.functional.polar_scan`; or "softmax".
        spec: a rotation by positions in addition; positions continue over packed sequences, where
            only their differences count. None for phases alone.
        rotary: the :class:`SelectiveRotary` that computes the phases; None for its default options.
        decay: whether the memory of the scan decays by logsigmoid(w · x + b) / 16, per head and token
            (Gated Linear Attention).
        output_gate: whether the outputs of the heads are multiplied by silu(W x).
        qk_norm: whether queries and keys have an RMS norm with weights.
        device, dtype: device and dtype of the parameters, except those of a given ``rotary``.

    Raises:
        TypeError, ValueError: invalid options; the message names the option.

    Sources: see :class:`SelectiveRotary`; decay: Yang et al. (arXiv 2312.06635), section 4.4.

    >>> attention, cache = SelectiveAttention(32, 4, 8), SelectiveCache()
    >>> attention(torch.randn(2, 5, 32), cache=cache).shape
    torch.Size([2, 5, 32])
    >>> attention(torch.randn(2, 1, 32), cache=cache).shape  # the next token
    torch.Size([2, 1, 32])
    """

    @public()
    def __init__(  # noqa: PLR0913  (one argument for each option)
        self,
        d_model: int,
        num_heads: int,
        d_head: int,
        *,
        form: str = "scan",
        spec: RopeSpec | None = None,
        rotary: SelectiveRotary | None = None,
        decay: bool = False,
        output_gate: bool = False,
        qk_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("d_model", d_model), ("num_heads", num_heads), ("d_head", d_head)):
            check_count(name, count)
        for name, flag in (("decay", decay), ("output_gate", output_gate), ("qk_norm", qk_norm)):
            check_flag(name, flag)
        check_dtype(dtype)
        if d_head % 2:
            raise bad_value(f"d_head must be even but got {d_head}")
        if form not in _FORMS:
            raise bad_value(f"form must be 'scan' or 'softmax' but got {form!r}")
        if decay and form != "scan":
            raise bad_value("decay must be False for form 'softmax'")
        if spec is None:
            spec = RopeSpec(d_head, scaling=Given((0.0,) * (d_head // 2)))
        elif not isinstance(spec, RopeSpec) or spec.head_dim != d_head:
            raise bad_value(f"spec must be a RopeSpec with head_dim={d_head} but got {spec!r}")
        if spec.by_length:
            raise bad_value(
                "spec must have frequencies that do not depend on the length", spec=spec
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        wanted = (d_model, num_heads, spec.rotary_dim // 2)
        if rotary is None:
            rotary = SelectiveRotary(*wanted, **factory)
        elif not isinstance(rotary, SelectiveRotary):
            raise bad_type(f"rotary must be a SelectiveRotary but got {describe(rotary)}")
        elif (rotary.d_model, rotary.num_heads, rotary.pairs) != wanted:
            raise bad_value(
                "rotary must have d_model={}, num_heads={} and pairs={}".format(*wanted),
                rotary=rotary,
            )
        self.spec, self.form, self.rotary = spec, form, rotary
        self.d_model, self.num_heads, self.d_head = d_model, num_heads, d_head

        def project(width: int, bias: bool = False) -> torch.nn.Linear:
            return torch.nn.Linear(d_model, width, bias=bias, **factory)

        inside = num_heads * d_head
        self.q_proj, self.k_proj, self.v_proj = (project(inside) for _ in range(3))
        self.out = torch.nn.Linear(inside, d_model, bias=False, **factory)
        self.decay = project(num_heads, bias=True) if decay else None
        self.output_gate = project(inside) if output_gate else None
        self.q_norm, self.k_norm = (
            torch.nn.RMSNorm(d_head, **factory) if qk_norm else None for _ in range(2)
        )

    @public()
    def forward(
        self,
        x: torch.Tensor,
        *,
        cache: SelectiveCache | None = None,
        reset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the tokens of x and of the cache.

        Args:
            x: ``(batch, tokens, d_model)``.
            cache: the preceding tokens; the call appends those of x.
            reset: where a new sequence starts, see :func:`tightrope.phases.running`; tokens do not
                attend to tokens of another sequence. None if form is "softmax" and there is a cache.

        Returns:
            ``(batch, tokens, d_model)``.

        Raises:
            TypeError, ValueError: invalid arguments; the message names the argument.
        """
        _check_input(x, self.q_proj.weight)
        if cache is not None and not isinstance(cache, SelectiveCache):
            raise bad_type(f"cache must be a SelectiveCache but got {describe(cache)}")
        softmax = self.form == "softmax"
        if softmax and cache is not None and reset is not None:
            raise bad_value(
                "reset must be None with a cache if form is 'softmax': start each sequence with a new "
                "cache"
            )
        starts = None if reset is None else starts_of(x[:, None], reset)
        own, state = self.rotary(x, None if cache is None else cache.rotary, starts)
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, self.d_head)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast, weights and projections differ in dtype.
            q = self.q_norm(q.to(self.q_norm.weight)).to(v)
            k = self.k_norm(k.to(self.k_norm.weight)).to(v)
        memory, keys = None, k
        if softmax:
            y, keys, v = self._softmax(q, k, v, own, cache, starts)
        else:
            y, memory = self._scan(x, q, k, v, own, None if cache is None else cache.memory, starts)
        y = y.transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            y = y * silu(self.output_gate(x))
        y = self.out(y)
        if cache is not None:
            # Last, so that a call that raises leaves the cache unchanged.
            cache.rotary, cache.memory = state, memory
            if softmax:
                cache.kv.k, cache.kv.v = keys, v
        return y  # type: ignore[no-any-return]

    def _scan(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own: Phases,
        memory: PolarState | None,
        starts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, PolarState]:
        decay = None
        if self.decay is not None:
            decay = self.decay(x)
            decay = decay.to(torch.promote_types(decay.dtype, torch.float32))
            decay = logsigmoid(decay).mT[..., None] / 16.0
        if starts is not None:
            if decay is None:
                decay = torch.zeros(starts.shape, device=x.device)[:, None, :, None]
            decay = decay.masked_fill(starts[:, None, :, None], -torch.inf)
        form = "step" if x.shape[1] == 1 else "chunked"
        return functional.polar_scan(
            q * self.d_head**-0.5, k, v, self.spec, decay, phases=own, state=memory, form=form
        )

    def _softmax(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own: Phases,
        cache: SelectiveCache | None,
        starts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the outputs, and the keys and values of all tokens."""
        kv = KVCache() if cache is None else cache.kv
        q, k = functional.rotate_qk(q, k, self.spec, kv.tokens, phases=own)
        k, v = kv.followed_by(k, v)
        new, every = q.shape[2], k.shape[2]
        mask = None
        if starts is not None or new not in (1, every):
            mask = torch.ones(new, every, dtype=torch.bool, device=q.device).tril(every - new)
        if starts is not None and mask is not None:
            sequence = starts.to(torch.int64).cumsum(1)
            mask = mask & (sequence[:, None, :, None] == sequence[:, None, None])
        y = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and new == every,
            scale=self.spec.softmax_scaling / math.sqrt(self.d_head),
        )
        return y, k, v

    def extra_repr(self) -> str:
        """Return the arguments shown in the repr."""
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, d_head={self.d_head}, "
            f"form={self.form!r}"
        )
