"""Run the code of other libraries and compare it with `tightrope.stacks`: `python -m tests.coverage.stacks FOLDER`.

FOLDER holds the libraries' source, unpacked: wheels or source distributions, each in a folder of its
own. Only the functions and classes that rotate are executed, cut out of their files, because most of
these libraries import far more than they need here. For each stack, the library's own code and
Tightrope with that stack rotate the same queries and keys; results and gradients are compared bit
for bit. The counts are stored with the versions in tests/coverage/rows/stacks.json.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import pages
from tightrope import RopeSpec, frequencies, stacks
from tightrope.functional import rotate_qk

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stacks.md"
RESULTS = Path(__file__).resolve().parent / "rows" / "stacks.json"
TOKENS, HEADS, BASE = 60, 3, 10000.0
CAST = ", cast"  # ends the name of a case whose module was cast to the dtype of q and k
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Takes q and k (batch, seq, heads, dim), and ids (batch, seq); returns both rotated.
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Case = tuple[str, RopeSpec, Rotation]


class CustomOp(torch.nn.Module):
    """Replaces the base classes of operators in vLLM and SGLang; has no custom kernels."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    @classmethod
    def register(cls, _: str) -> Callable[[Any], Any]:
        """Return a decorator that does nothing."""
        return lambda kind: kind

    @staticmethod
    def enabled() -> bool:
        """Return that no custom kernel is used."""
        return False


class Source:
    """The files of one folder, from which functions and classes are cut."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cut(self, pattern: str, *wanted: str, **given: Any) -> types.SimpleNamespace:
        """Execute the named functions and classes of one file.

        Args:
            pattern: the end of the file's path, as a glob pattern; of several matching files, one
                with the fewest parent folders is read.
            wanted: names, in the order of their dependencies.
            given: values of other names that the code uses.
        """
        found = sorted(self.folder.glob(f"**/{pattern}"), key=lambda path: len(path.parts))
        if not found:
            raise FileNotFoundError(f"{self.folder} has no {pattern}")
        body = ast.parse(found[0].read_text(encoding="utf-8")).body
        nodes = {node.name: node for node in body if hasattr(node, "name")}
        longest = types.SimpleNamespace(max_model_len=4096)
        scope: dict[str, Any] = {
            "logger": types.SimpleNamespace(warning_once=lambda *_: None),
            "get_current_vllm_config": lambda: types.SimpleNamespace(model_config=longest),
            "torch": torch,
            "nn": torch.nn,
            "Tensor": torch.Tensor,
            "math": math,
            "lru_cache": functools.lru_cache,
            "internal_api": lambda f: f,
            "CustomOp": CustomOp,
            "BaseFusedOp": CustomOp,
            **vars(typing),
            **given,
        }
        for name in wanted:
            # As this file, the code is compiled without evaluating annotations.
            tree = ast.Module(body=[nodes[name]], type_ignores=[])
            exec(compile(tree, str(found[0]), "exec"), scope)
        return types.SimpleNamespace(**{name: scope[name] for name in wanted})


RULES = {
    "default": None,
    "linear": frequencies.Linear(3.0),
    "yarn": frequencies.YaRN(4.0, 1024),
    "yarn, mscales": frequencies.YaRN(40.0, 1024, mscale=0.7, mscale_all_dim=1.1),
    "yarn, truncate=False": frequencies.YaRN(32.0, 4096, truncate=False),
    "llama3": frequencies.Llama3(8.0, 1.0, 4.0, 8192),
    "dynamic": frequencies.DynamicNTK(2.5, 1024),
    "longrope": frequencies.LongRoPE(
        tuple(1 + k / 32 for k in range(32)),
        tuple(2 + k / 3 for k in range(32)),
        64,
        short_mscale=1.1,
        long_mscale=1.3,
    ),
    "proportional": frequencies.Proportional(0.25),
}
# Beyond all positions that are rotated, so that all of them are of rows within the original length.
RULES["longrope, short rows"] = dataclasses.replace(RULES["longrope"], original_max_position=4000)


def spec_of(rule: str, interleaved: bool = False, base: float = BASE) -> RopeSpec:
    """Return the spec of a case."""
    return RopeSpec(64, base=base, scaling=RULES[rule], interleaved=interleaved)


def meta(source: Source) -> Iterator[Case]:
    """Yield cases with Meta's functions."""
    code = source.cut(
        "llama_models/llama3/model.py",
        "apply_scaling",
        "precompute_freqs_cis",
        "reshape_for_broadcast",
        "apply_rotary_emb",
    )
    for rule in ("default", "llama3"):
        table = code.precompute_freqs_cis(64, 4096, BASE, rule == "llama3")
        yield (
            rule,
            spec_of(rule, True),
            lambda q, k, ids, table=table: code.apply_rotary_emb(q, k, table[ids[0]]),
        )


def gpt_oss(source: Source) -> Iterator[Case]:
    """Yield cases with OpenAI's reference for gpt-oss."""
    code = source.cut("gpt_oss*model.py", "_apply_rotary_emb", "RotaryEmbedding")
    for rule in ("default", "yarn, truncate=False"):
        base = 10000.0 if rule == "default" else 150000.0
        made = code.RotaryEmbedding(
            64, base, torch.float32, 4096, 1.0 if rule == "default" else 32.0
        )
        cos, sin = made._compute_cos_sin(4096)

        def rotation(q: Any, k: Any, ids: Any, cos: Any = cos, sin: Any = sin) -> Any:
            at = cos[ids[0]], sin[ids[0]]
            return code._apply_rotary_emb(q, *at), code._apply_rotary_emb(k, *at)

        yield rule, spec_of(rule, base=base), rotation


def torchtune(source: Source) -> Iterator[Case]:
    """Yield cases with torchtune's modules."""
    plain = source.cut("torchtune/modules/position_embeddings.py", "RotaryPositionalEmbeddings")
    scaled = source.cut("torchtune/models/llama3_1/_position_embeddings.py", "Llama3ScaledRoPE")
    for rule, kind in (
        ("default", plain.RotaryPositionalEmbeddings),
        ("llama3", scaled.Llama3ScaledRoPE),
    ):
        for cast in ("", CAST):

            def rotation(q: Any, k: Any, ids: Any, kind: Any = kind, cast: str = cast) -> Any:
                made = kind(64, 8192, int(BASE)).to(q.dtype if cast else None)
                return made(q, input_pos=ids), made(k, input_pos=ids)

            yield rule + cast, spec_of(rule, True), rotation


def litgpt(source: Source) -> Iterator[Case]:
    """Yield cases with LitGPT's functions."""
    code = source.cut("litgpt/model.py", "yarn_get_mscale", "build_rope_cache", "apply_rope")
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 1024}
    extra: dict[str, Any] = {
        "default": None,
        "linear": {"factor": 3.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
        "yarn": {"factor": 4.0, **yarn},
        "yarn, mscales": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1, **yarn},
    }
    for rule, config in extra.items():
        cos, sin = code.build_rope_cache(4096, 64, base=int(BASE), extra_config=config)

        for cast in ("", CAST):

            def rotation(
                q: Any, k: Any, ids: Any, cos: Any = cos, sin: Any = sin, cast: str = cast
            ) -> Any:
                at = [table[ids].to(q.dtype if cast else table.dtype) for table in (cos, sin)]
                return tuple(
                    code.apply_rope(x.transpose(1, 2), *at).transpose(1, 2) for x in (q, k)
                )

            yield rule + cast, spec_of(rule), rotation


def megatron(source: Source) -> Iterator[Case]:
    """Yield cases with Megatron-LM's embeddings and unfused rotation."""
    folder = "megatron/core/models/common/embeddings/"
    plain = source.cut(folder + "rotary_pos_embedding.py", "RotaryEmbedding", parallel_state=None)
    yarn = source.cut(
        folder + "yarn_rotary_pos_embedding.py",
        "_yarn_find_correction_dim",
        "_yarn_find_correction_range",
        "_yarn_linear_ramp_mask",
        "_yarn_get_mscale",
        "_yarn_get_concentration_factor",
        "YarnRotaryEmbedding",
        RotaryEmbedding=plain.RotaryEmbedding,
    )
    rope = source.cut(folder + "rope_utils.py", "_rotate_half", "_apply_rotary_pos_emb_bshd")
    # The code moves frequencies to the current CUDA device; here that is the CPU.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    for rule in ("default", "linear", "llama3", "yarn", "yarn, mscales"):
        scaling: Any = RULES[rule]
        alone = types.SimpleNamespace(size=lambda: 1)
        common = {"use_cpu_initialization": True, "cp_group": alone}
        if rule.startswith("yarn"):
            made = yarn.YarnRotaryEmbedding(
                64,
                1.0,
                rotary_base=BASE,
                scaling_factor=scaling.factor,
                original_max_position_embeddings=1024,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=scaling.mscale,
                mscale_all_dim=scaling.mscale_all_dim,
                **common,
            )
            angles, mscale = made.get_emb(4096)
        else:
            made = plain.RotaryEmbedding(
                64,
                1.0,
                seq_len_interpolation_factor=3.0 if rule == "linear" else None,
                rotary_base=int(BASE),
                rope_scaling=rule == "llama3",
                rope_scaling_factor=8.0,
                **common,
            )
            angles, mscale = made.get_emb(4096), 1.0

        def rotation(q: Any, k: Any, ids: Any, angles: Any = angles, mscale: float = mscale) -> Any:
            at = angles[ids[0]]  # (seq, 1, 1, dim)
            return tuple(
                rope._apply_rotary_pos_emb_bshd(x.transpose(0, 1), at, mscale=mscale).transpose(
                    0, 1
                )
                for x in (q, k)
            )

        yield rule, spec_of(rule), rotation


def flash_attention(source: Source) -> Iterator[Case]:
    """Yield cases with flash-attention's layer and its reference rotation."""

    def repeat(x: torch.Tensor, pattern: str) -> torch.Tensor:
        return (x.repeat_interleave(2, -1) if "(d 2)" in pattern else torch.cat((x, x), -1))[
            ..., None, :
        ]

    def rearrange(x: torch.Tensor, *_: str, **__: int) -> torch.Tensor:
        return x.flatten(-2)

    code = source.cut(
        "flash_attn/layers/rotary.py",
        "rotate_half",
        "apply_rotary_emb_torch",
        "RotaryEmbedding",
        repeat=repeat,
        rearrange=rearrange,
    )
    for interleaved in (False, True):
        made = code.RotaryEmbedding(64, BASE, interleaved)

        def rotation(q: Any, k: Any, ids: Any, made: Any = made, pair: bool = interleaved) -> Any:
            made._seq_len_cached = 0
            made._update_cos_sin_cache(4096, q.device, q.dtype)
            at = made._cos_cached[ids[0]], made._sin_cached[ids[0]]
            return tuple(code.apply_rotary_emb_torch(x, *at, pair) for x in (q, k))

        yield f"interleaved={interleaved}", spec_of("default", interleaved), rotation


def transformer_engine(source: Source) -> Iterator[Case]:
    """Yield cases with TransformerEngine's embedding and unfused rotation."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    code = source.cut(
        "*rope.py", "_rotate_half", "_apply_rotary_pos_emb_base", "RotaryPositionEmbedding"
    )
    for rule, factor, pretrained in (("default", None, None), ("linear", 3.0, 4096)):
        for cast in ("", CAST):

            def rotation(
                q: Any, k: Any, ids: Any, more: Any = (factor, pretrained, BASE), cast: str = cast
            ) -> Any:
                made = code.RotaryPositionEmbedding(64, 1.0, *more).to(q.dtype if cast else None)
                at = made(4096)[ids[0]]
                return tuple(code._apply_rotary_pos_emb_base(x, at, "bshd") for x in (q, k))

            yield rule + cast, spec_of(rule), rotation


def _serving(
    source: Source, folder: str, base: Any, files: dict[str, Sequence[str]]
) -> Iterator[Case]:
    """Yield the cases of vLLM and SGLang, whose modules take the same arguments.

    Args:
        folder: the folder of the modules.
        base: the class for unscaled frequencies, from which the others derive.
        files: for each rule the file of helpers, their names, the file of the class and its name.
    """
    for rule, (helpers, *names, file, kind) in files.items():
        scope = vars(source.cut(f"{folder}/{helpers}", *names)) if names else {}
        make = base
        if kind != "RotaryEmbedding":
            make = getattr(
                source.cut(f"{folder}/{file}", kind, RotaryEmbedding=base, **scope), kind
            )
        scaling: Any = RULES[rule]
        for interleaved in (False, True)[
            : 1 if rule.startswith(("longrope", "proportional")) else 2
        ]:

            def made(
                dtype: Any,
                make: Any = make,
                rule: str = rule,
                scaling: Any = scaling,
                neox: bool = not interleaved,
            ) -> Any:
                sizes, rest = (64, 64, 4096), (int(BASE), neox)
                if rule == "default":
                    return make(*sizes, *rest, dtype)
                if rule == "linear":
                    return make(*sizes, *rest, scaling.factor, dtype)
                if rule == "llama3":
                    return make(*sizes, *rest, dtype, 8.0, 1.0, 4.0, 8192)
                if rule == "dynamic":
                    return make(*sizes, 1024, *rest, scaling.factor, dtype)
                if rule == "proportional":
                    return make(64, 16, 4096, *rest, dtype)
                if rule.startswith("longrope"):
                    factors = [*scaling.short_factor], [*scaling.long_factor]
                    mscales = scaling.short_mscale, scaling.long_mscale
                    original = scaling.original_max_position
                    return make(*sizes, original, *rest, dtype, *factors, *mscales)
                both = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
                return make(
                    64, 64, 1024, *rest, scaling.factor, dtype, **(both if scaling.mscale else {})
                )

            def rotation(q: Any, k: Any, ids: Any, made: Any = made) -> Any:
                module = made(q.dtype)
                rows = [
                    getattr(module, "forward_native", module)(at, one.flatten(1), other.flatten(1))
                    for at, one, other in zip(ids, q, k, strict=True)
                ]
                both = zip(zip(*rows, strict=True), (q, k), strict=True)
                return tuple(torch.stack(each).view(x.shape) for each, x in both)

            yield f"{rule}, interleaved={interleaved}", spec_of(rule, interleaved), rotation


_YARN = (
    "yarn_find_correction_dim",
    "yarn_find_correction_range",
    "yarn_linear_ramp_mask",
    "yarn_get_mscale",
)
_LONGROPE = "Phi3LongRoPEScaledRotaryEmbedding"


def vllm(source: Source) -> Iterator[Case]:
    """Yield cases with vLLM's `forward_native`."""
    folder = "vllm/model_executor/layers/rotary_embedding"
    common = source.cut(
        f"{folder}/common.py",
        "ApplyRotaryEmb",
        current_platform=types.SimpleNamespace(is_cpu=lambda: True),
    )
    code = source.cut(
        f"{folder}/base.py",
        "RotaryEmbeddingBase",
        "RotaryEmbedding",
        ApplyRotaryEmb=common.ApplyRotaryEmb,
        rocm_aiter_ops=types.SimpleNamespace(is_triton_rotary_embed_enabled=lambda: False),
    )
    yarn = ("common.py", *_YARN, "yarn_scaling_rope.py", "YaRNScalingRotaryEmbedding")
    longrope = ("common.py", "rotate_neox", "phi3_long_rope_scaled_rope.py", _LONGROPE)
    files: dict[str, Sequence[str]] = {
        "default": ("", "base.py", "RotaryEmbedding"),
        "linear": ("", "linear_scaling_rope.py", "LinearScalingRotaryEmbedding"),
        "dynamic": ("", "dynamic_ntk_scaling_rope.py", "DynamicNTKScalingRotaryEmbedding"),
        "yarn": yarn,
        "yarn, mscales": yarn,
        "llama3": ("", "llama3_rope.py", "Llama3RotaryEmbedding"),
        "longrope": longrope,
        "longrope, short rows": longrope,
        "proportional": ("", "gemma4_rope.py", "Gemma4RotaryEmbedding"),
    }
    yield from _serving(source, folder, code.RotaryEmbedding, files)


def sglang(source: Source) -> Iterator[Case]:
    """Yield cases with SGLang's `forward_native`."""
    folder = "sglang/srt/layers/rotary_embedding"
    names = "_is_cuda _is_hip _is_xpu _is_npu _is_musa _is_mps _use_aiter _is_cpu_amx_available"
    code = source.cut(
        f"{folder}/base.py",
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        apply_rotary_emb=source.cut(f"{folder}/utils.py", "apply_rotary_emb").apply_rotary_emb,
        publish_role=lambda: None,
        current_platform=None,
        _is_cpu=True,
        **dict.fromkeys(names.split(), False),
        envs=types.SimpleNamespace(SGLANG_ROPE_CACHE_FP32=types.SimpleNamespace(get=lambda: False)),
    )
    yarn = ("yarn.py", *_YARN, "yarn_get_mscale_simple", "yarn.py", "YaRNScalingRotaryEmbedding")
    longrope = ("utils.py", "rotate_neox", "rope_variant.py", _LONGROPE)
    files: dict[str, Sequence[str]] = {
        "default": ("", "base.py", "RotaryEmbedding"),
        "linear": ("", "base.py", "LinearScalingRotaryEmbedding"),
        "yarn": yarn,
        "yarn, mscales": yarn,
        "llama3": ("", "rope_variant.py", "Llama3RotaryEmbedding"),
        "longrope": longrope,
        "longrope, short rows": longrope,
    }
    yield from _serving(source, folder, code.RotaryEmbedding, files)


STACKS: dict[str, Callable[[Source], Iterator[Case]]] = {
    "meta": meta,
    "gpt-oss": gpt_oss,
    "torchtune": torchtune,
    "litgpt": litgpt,
    "megatron": megatron,
    "flash-attention-reference": flash_attention,
    "transformer-engine-unfused": transformer_engine,
    "vllm-native": vllm,
    "sglang-native": sglang,
}


def compared(
    stack: stacks.Stack, spec: RopeSpec, rotation: Rotation, dtype: torch.dtype
) -> list[int]:
    """Compare `rotation`, another library's, with `rotate_qk` under a stack.

    Returns:
        The number of elements of the results, which is also that of the gradients; how many
        elements of the results differ; and how many of the gradients.
    """
    generator = torch.Generator().manual_seed(7)
    draws = [
        torch.randn(2, TOKENS, heads, 64, generator=generator).to(dtype) for heads in (HEADS, 1) * 2
    ]
    ids = (torch.arange(TOKENS) * 67 + 5).expand(2, -1)
    longest = (
        int(ids.max()) + 1 if stack.name.startswith("sglang") else 4096
    )  # of a step, or configured
    seq_len = longest if spec.by_length else None
    outcomes = []
    for rotate in (
        rotation,
        lambda q, k, ids: rotate_qk(
            q, k, spec.at(ids, stack=stack, seq_len=seq_len), layout="bshd"
        ),
    ):
        q, k = (x.clone().requires_grad_() for x in draws[:2])
        ys = rotate(q, k, ids)
        grads = torch.autograd.grad(ys, (q, k), draws[2:])
        outcomes.append(([y.detach() for y in ys], grads))
    (ys, grads), (ours, our_grads) = outcomes

    def different(one: Any, other: Any) -> int:
        return sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))

    size = sum(x.numel() for x in draws[:2])
    return [size, different(ys, ours), different(grads, our_grads)]


def table() -> str:
    """Return the table of all stacks for docs/stacks.md."""
    rows = []
    for stack in map(stacks.get, stacks.names()):
        rules = ", ".join(sorted(each.__name__ for each in stack.rules if each is not None))
        kept = "the dtype of x" if stack.table_dtype is None else "float32"
        same = stack.rounding[0] == stack.rounding[1]
        rounding = stack.rounding[0] if same else ", ".join(stack.rounding)
        rows.append(
            (
                f"`{stack.name}`",
                stack.about,
                rules or "none",
                kept,
                rounding,
                stack.source,
                stack.verified,
            )
        )
    headings = (
        "name",
        "library",
        "rules besides the default",
        "tables",
        "rounding",
        "source",
        "verified",
    )
    return "\n".join(pages.table(headings, rows))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage.stacks", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", help="the libraries' source; none to write the page only"
    )
    parser.add_argument("--only", choices=STACKS, help="one stack")
    options = parser.parse_args(arguments)
    pages.between_marks(PAGE, "stacks", table())
    if options.folder is None:
        return
    found: dict[str, Any] = {} if not RESULTS.exists() else json.loads(RESULTS.read_text())
    for name in [options.only] if options.only else STACKS:
        stack = stacks.get(name)
        cases = {
            f"{case}, {str(dtype).removeprefix('torch.')}": compared(
                stack.cast(dtype) if CAST in case else stack, spec, rotation, dtype
            )
            for case, spec, rotation in STACKS[name](Source(options.folder))
            for dtype in DTYPES
        }
        found[name] = {"source": stack.source, "torch": torch.__version__, **cases}
        for case, counts in cases.items():
            sys.stdout.write(f"{name}: {case}: {counts}\n")
    RESULTS.write_text(pages.written(dict(sorted(found.items()))), encoding="utf-8")


if __name__ == "__main__":
    main()
