"""LRPE rotate 1-D as a module, with learnable angles."""

from __future__ import annotations

from typing import Any

import torch

from .. import functional
from .._errors import bad_value, check_flag, check_type, describe, positive, public
from ..activations import ACTS, RMS_NORM
from ..channels import Channels
from ..ops.checks import check_count, check_dtype
from ..positions import Positions


class LrpeRotate1d(torch.nn.Module):
    """LRPE rotate 1-D with a learnable θ: see :func:`tightrope.functional.lrpe_rotate_1d`.

    θ is initialised to the frequencies of standard RoPE, ``base^(-2k / rotary_dim)`` for pair k, equal
    for all heads; with one θ per head, to ``base^(-h / num_heads)`` for head h.

    θ is a parameter, so ``.to(torch.bfloat16)`` rounds it, by a relative error of up to 2^-8, which
    the position multiplies, and calls warn of it: keep θ in float32 or wider. Weight decay would slow
    every pair down; put θ in an optimiser group without it.

    Args:
        head_dim: channels of a head.
        num_heads: number of heads; None if x has none, or if all heads share θ.
        per: θ has one number per "head and pair" ``(num_heads, pairs)``, per "pair" ``(pairs,)`` or
            per "head" ``(num_heads,)``. By default "head and pair", or "pair" if ``num_heads``
            is None.
        act, dim, start, rotary_dim: see :func:`tightrope.functional.lrpe_rotate_1d`, which checks dim;
            act must be a name.
        base: base of the initial θ; positive.
        learnable: whether θ requires grad.
        device, dtype: device and dtype of θ.

    Attributes:
        theta: the parameter, radians per position.

    Raises:
        TypeError, ValueError: invalid options; the message names the option.

    Source: see :func:`tightrope.functional.lrpe_rotate_1d`.

    >>> rotate = LrpeRotate1d(64, num_heads=8, act="silu")
    >>> rotate(torch.randn(2, 16, 8, 64)).shape, rotate.theta.shape
    (torch.Size([2, 16, 8, 64]), torch.Size([8, 32]))
    """

    @public()
    def __init__(  # noqa: PLR0913  (one argument for each option)
        self,
        head_dim: int,
        num_heads: int | None = None,
        *,
        per: str | None = None,
        act: str = "none",
        dim: int | None = None,
        start: int = 0,
        rotary_dim: int | None = None,
        base: float = 10000.0,
        learnable: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        channels = Channels.checked(head_dim, rotary_dim, start, False)
        if num_heads is not None:
            check_count("num_heads", num_heads)
        shapes = {
            "head and pair": (num_heads, channels.pairs),
            "pair": (channels.pairs,),
            "head": (num_heads,),
        }
        if per is None:
            per = "pair" if num_heads is None else "head and pair"
        if per not in [*shapes]:
            raise bad_value(f"per must be one of {', '.join(map(repr, shapes))} but got {per!r}")
        shape: Any = shapes[per]
        if None in shape:
            raise bad_value(f"num_heads must be given for per={per!r} but is None")
        if not isinstance(act, str) or act not in ACTS[:RMS_NORM]:
            names = ", ".join(ACTS[:RMS_NORM])
            raise bad_value(f"act must be one of {names} but got {describe(act)}")
        self.head_dim, self.num_heads, self.per = channels.head_dim, num_heads, per
        self.start, self.rotary_dim = channels.start, channels.rotary_dim
        self.act, self.dim, self.base = act, dim, positive("base", base)
        check_dtype(dtype)
        check_flag("learnable", learnable)
        self.theta = torch.nn.Parameter(
            torch.empty(shape, device=device, dtype=dtype), requires_grad=learnable
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set θ to its initial values, for example after ``to_empty``."""
        count = self.num_heads if self.per == "head" else self.rotary_dim // 2
        steps = torch.arange(self.theta.shape[-1], dtype=torch.float64) / (count or 1)
        with torch.no_grad():
            self.theta.copy_((self.base**-steps).expand(self.theta.shape))

    @public()
    def forward(self, x: torch.Tensor, offset: int | torch.Tensor | Positions = 0) -> torch.Tensor:
        """Rotate a tensor.

        Args:
            x: floating ``(batch, tokens, num_heads, head_dim)``, or ``(batch, tokens, head_dim)``
                without heads.
            offset: position of the first token, see
                :func:`tightrope.functional.lrpe_rotate_1d`.

        Returns:
            A new tensor of the same shape and dtype.

        Raises:
            ValueError: a wrong number of channels or heads, or an offset that does not fit.
            TypeError: a tensor or offset of an unsupported dtype.
        """
        check_type("x", x)
        if x.dim() not in (3, 4) or x.shape[-1] != self.head_dim:
            heads = "heads" if self.num_heads is None else self.num_heads
            raise bad_value(
                f"x must have shape (batch, tokens, {heads}, {self.head_dim}) or, if num_heads "
                f"is None, (batch, tokens, {self.head_dim})",
                x=x,
            )
        return functional.lrpe_rotate_1d(
            x,
            self.theta,
            offset,
            self.act,
            self.dim,
            start=self.start,
            rotary_dim=self.rotary_dim,
            theta_axis="head" if self.per == "head" else "pair",
        )

    def extra_repr(self) -> str:
        """Return the arguments shown in the repr."""
        parts: dict[str, Any] = {"num_heads": self.num_heads, "per": self.per, "act": self.act}
        if self.dim is not None:
            parts["dim"] = self.dim
        if self.start or self.rotary_dim != self.head_dim:
            parts |= {"start": self.start, "rotary_dim": self.rotary_dim}
        options = ", ".join(f"{key}={value!r}" for key, value in parts.items())
        frozen = "" if self.theta.requires_grad else ", learnable=False"
        return f"{self.head_dim}, {options}, base={self.base:g}{frozen}"
