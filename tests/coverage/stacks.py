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
import functools
import itertools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import pages
from tests.support.rows import read_rows
from tightrope import RopeSpec, frequencies, stacks
from tightrope.functional import rotate_qk

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
RESULTS = Path(__file__).resolve().parent / "rows" / "stacks.json"
TOKENS, HEADS, BASE = 60, 3, 10000.0
CAST = ", cast"  # ends the name of a case whose module was cast to the dtype of q and k
CASTS = ("torchtune", "litgpt", "transformer-engine-unfused")  # whose modules users cast
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Takes q and k (batch, seq, heads, dim), ids (batch, seq), and the dtype to which the module is cast, or None;
# returns both rotated.
Rotation = Callable[..., Any]
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


# Names that the code uses.
USED: dict[str, Any] = {
    "torch": torch,
    "nn": torch.nn,
    "Tensor": torch.Tensor,
    "math": math,
    "CustomOp": CustomOp,
    "BaseFusedOp": CustomOp,
    "internal_api": lambda f: f,
    "lru_cache": functools.lru_cache,
    "logger": types.SimpleNamespace(warning_once=lambda *_: None),
}


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
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=4096))
        scope: dict[str, Any] = {**vars(typing), **USED, "get_current_vllm_config": lambda: config}
        scope |= given
        for name in wanted:
            # As this file, the code is compiled without evaluating annotations.
            tree = ast.Module(body=[nodes[name]], type_ignores=[])
            exec(compile(tree, str(found[0]), "exec"), scope)
        return types.SimpleNamespace(**{name: scope[name] for name in wanted})


ROWS = read_rows(Path(__file__).with_name("rules.jsonl"))
# The rows of "longrope, short rows" are within the original length at all positions that are rotated.
RULES = {
    name: row["rule"] and frequencies.Rule.from_dict(row["rule"]) for name, row in ROWS.items()
}


def spec_of(rule: str, interleaved: bool = False, base: float = BASE) -> RopeSpec:
    """Return the spec of a case."""
    return RopeSpec(64, base=base, scaling=RULES[rule], interleaved=interleaved)


def both(one: Callable[[Any], Any], q: Any, k: Any) -> tuple[Any, Any]:
    return one(q), one(k)


def meta(source: Source) -> Iterator[Case]:
    """Yield cases with Meta's functions."""
    names = "apply_scaling precompute_freqs_cis reshape_for_broadcast apply_rotary_emb".split()
    code = source.cut("llama_models/llama3/model.py", *names)

    def rotate(table: Any, q: Any, k: Any, ids: Any, _: Any) -> Any:
        return code.apply_rotary_emb(q, k, table[ids[0]])

    for rule in ("default", "llama3"):
        table = code.precompute_freqs_cis(64, 4096, BASE, rule == "llama3")
        yield rule, spec_of(rule, True), partial(rotate, table)


def gpt_oss(source: Source) -> Iterator[Case]:
    """Yield cases with OpenAI's reference for gpt-oss."""
    code = source.cut("gpt_oss*model.py", "_apply_rotary_emb", "RotaryEmbedding")

    def rotate(cos: Any, sin: Any, q: Any, k: Any, ids: Any, _: Any) -> Any:
        return both(lambda x: code._apply_rotary_emb(x, cos[ids[0]], sin[ids[0]]), q, k)

    for rule, base, factor in (("default", BASE, 1.0), ("yarn, truncate=False", 150000.0, 32.0)):
        made = code.RotaryEmbedding(64, base, torch.float32, 4096, factor)
        yield rule, spec_of(rule, base=base), partial(rotate, *made._compute_cos_sin(4096))


def torchtune(source: Source) -> Iterator[Case]:
    """Yield cases with torchtune's modules."""
    plain = source.cut("torchtune/modules/position_embeddings.py", "RotaryPositionalEmbeddings")
    scaled = source.cut("torchtune/models/llama3_1/_position_embeddings.py", "Llama3ScaledRoPE")
    kinds = {"default": plain.RotaryPositionalEmbeddings, "llama3": scaled.Llama3ScaledRoPE}

    def rotate(kind: Any, q: Any, k: Any, ids: Any, dtype: Any) -> Any:
        made = kind(64, 8192, int(BASE)).to(dtype)
        return both(lambda x: made(x, input_pos=ids), q, k)

    for rule, kind in kinds.items():
        yield rule, spec_of(rule, True), partial(rotate, kind)


def litgpt(source: Source) -> Iterator[Case]:
    """Yield cases with LitGPT's functions."""
    code = source.cut("litgpt/model.py", "yarn_get_mscale", "build_rope_cache", "apply_rope")
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 1024}
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
    extra: dict[str, Any] = {
        "default": None,
        "linear": {"factor": 3.0},
        "llama3": {"factor": 8.0, **bands},
        "yarn": {"factor": 4.0, **yarn},
        "yarn, mscales": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1, **yarn},
    }

    def rotate(tables: Any, q: Any, k: Any, ids: Any, dtype: Any) -> Any:
        at = [table[ids].to(dtype or table.dtype) for table in tables]
        return both(lambda x: code.apply_rope(x.transpose(1, 2), *at).transpose(1, 2), q, k)

    for rule, config in extra.items():
        tables = code.build_rope_cache(4096, 64, base=int(BASE), extra_config=config)
        yield rule, spec_of(rule), partial(rotate, tables)


def megatron(source: Source) -> Iterator[Case]:
    """Yield cases with Megatron-LM's embeddings and unfused rotation."""
    folder = "megatron/core/models/common/embeddings/"
    plain = source.cut(folder + "rotary_pos_embedding.py", "RotaryEmbedding", parallel_state=None)
    names = "find_correction_dim find_correction_range linear_ramp_mask get_mscale".split()
    names = [f"_yarn_{name}" for name in [*names, "get_concentration_factor"]]
    given = {"RotaryEmbedding": plain.RotaryEmbedding}
    yarn = source.cut(
        folder + "yarn_rotary_pos_embedding.py", *names, "YarnRotaryEmbedding", **given
    )
    rope = source.cut(folder + "rope_utils.py", "_rotate_half", "_apply_rotary_pos_emb_bshd")
    # The code moves frequencies to the current CUDA device; here that is the CPU.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

    def rotate(angles: Any, mscale: float, q: Any, k: Any, ids: Any, _: Any) -> Any:
        one = partial(rope._apply_rotary_pos_emb_bshd, mscale=mscale)
        at = angles[ids[0]]  # (seq, 1, 1, dim)
        return both(lambda x: one(x.transpose(0, 1), at).transpose(0, 1), q, k)

    alone = types.SimpleNamespace(size=lambda: 1)
    common: dict[str, Any] = {"use_cpu_initialization": True, "cp_group": alone}
    for rule in ("default", "linear", "llama3", "yarn", "yarn, mscales"):
        scaling: Any = RULES[rule]
        if rule.startswith("yarn"):
            more = {"scaling_factor": scaling.factor, "original_max_position_embeddings": 1024}
            more |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
            more |= {"rotary_base": BASE, "beta_fast": 32.0, "beta_slow": 1.0}
            made = yarn.YarnRotaryEmbedding(64, 1.0, **more, **common)
            yield rule, spec_of(rule), partial(rotate, *made.get_emb(4096))
            continue
        more = {"seq_len_interpolation_factor": 3.0 if rule == "linear" else None}
        more |= {"rope_scaling": rule == "llama3", "rope_scaling_factor": 8.0}
        made = plain.RotaryEmbedding(64, 1.0, rotary_base=int(BASE), **more, **common)
        yield rule, spec_of(rule), partial(rotate, made.get_emb(4096), 1.0)


def flash_attention(source: Source) -> Iterator[Case]:
    """Yield cases with flash-attention's layer and its reference rotation."""

    def repeat(x: torch.Tensor, pattern: str) -> torch.Tensor:
        wide = x.repeat_interleave(2, -1) if "(d 2)" in pattern else torch.cat((x, x), -1)
        return wide[..., None, :]

    def rearrange(x: torch.Tensor, *_: str, **__: int) -> torch.Tensor:
        return x.flatten(-2)

    names = "rotate_half", "apply_rotary_emb_torch", "RotaryEmbedding"
    given = {"repeat": repeat, "rearrange": rearrange}
    code = source.cut("flash_attn/layers/rotary.py", *names, **given)

    def rotate(interleaved: bool, q: Any, k: Any, ids: Any, _: Any) -> Any:
        made = code.RotaryEmbedding(64, BASE, interleaved)
        made._update_cos_sin_cache(4096, q.device, q.dtype)
        at = made._cos_cached[ids[0]], made._sin_cached[ids[0]]
        return both(lambda x: code.apply_rotary_emb_torch(x, *at, interleaved), q, k)

    for pair in (False, True):
        yield f"interleaved={pair}", spec_of("default", pair), partial(rotate, pair)


def transformer_engine(source: Source) -> Iterator[Case]:
    """Yield cases with TransformerEngine's embedding and unfused rotation."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    names = "_rotate_half", "_apply_rotary_pos_emb_base", "RotaryPositionEmbedding"
    code = source.cut("*rope.py", *names)

    def rotate(more: Any, q: Any, k: Any, ids: Any, dtype: Any) -> Any:
        at = code.RotaryPositionEmbedding(64, 1.0, *more).to(dtype)(4096)[ids[0]]
        return both(lambda x: code._apply_rotary_pos_emb_base(x, at, "bshd"), q, k)

    for rule, *more in (("default", None, None, BASE), ("linear", 3.0, 4096, BASE)):
        yield str(rule), spec_of(str(rule)), partial(rotate, more)


def _arguments(rule: str, dtype: Any, neox: bool) -> Any:
    """The arguments of the module of a rule, in vLLM and in SGLang, and its keywords."""
    sizes, rest, scaling = (64, 64, 4096), (int(BASE), neox), cast(Any, RULES[rule])
    if rule.startswith("longrope"):
        factors = [*scaling.short_factor], [*scaling.long_factor]
        mscales = scaling.short_mscale, scaling.long_mscale
        return (*sizes, scaling.original_max_position, *rest, dtype, *factors, *mscales), {}
    if rule.startswith("yarn"):
        more = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
        return (64, 64, 1024, *rest, scaling.factor, dtype), more if scaling.mscale else {}
    if rule in ("linear", "dynamic"):
        trained = (1024,) if rule == "dynamic" else ()
        return (*sizes, *trained, *rest, scaling.factor, dtype), {}
    if rule == "proportional":
        return (64, 16, 4096, *rest, dtype), {}
    return (*sizes, *rest, dtype, *((8.0, 1.0, 4.0, 8192) if rule == "llama3" else ())), {}


def _serving(
    source: Source, folder: str, base: Any, files: dict[str, Sequence[str]]
) -> Iterator[Case]:
    """Yield the cases of vLLM and SGLang, whose modules take the same arguments.

    Args:
        folder: the folder of the modules.
        base: the class for unscaled frequencies, from which the others derive.
        files: for each rule the file of helpers, their names, the file of the class and its name.
    """

    def rotate(make: Any, rule: str, neox: bool, q: Any, k: Any, ids: Any, _: Any) -> Any:
        given, more = _arguments(rule, q.dtype, neox)
        module = make(*given, **more)
        forward = getattr(module, "forward_native", module)
        rows = [forward(at, a.flatten(1), b.flatten(1)) for at, a, b in zip(ids, q, k, strict=True)]
        ys = map(torch.stack, zip(*rows, strict=True))
        return [y.view(x.shape) for y, x in zip(ys, (q, k), strict=True)]

    for rule, (helpers, *names, file, kind) in files.items():
        scope = vars(source.cut(f"{folder}/{helpers}", *names)) if names else {}
        given = {"RotaryEmbedding": base, **scope}
        made = (
            {} if kind == "RotaryEmbedding" else vars(source.cut(f"{folder}/{file}", kind, **given))
        )
        for pair in (False, True)[: 1 if rule.startswith(("longrope", "proportional")) else 2]:
            rotation = partial(rotate, made.get(kind, base), rule, not pair)
            yield f"{rule}, interleaved={pair}", spec_of(rule, pair), rotation


#: For each rule of vLLM and SGLang, the arguments of `_serving`.
SERVING: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("serving.json").read_text("utf-8")
)


def vllm(source: Source) -> Iterator[Case]:
    """Yield cases with vLLM's `forward_native`."""
    folder, space = "vllm/model_executor/layers/rotary_embedding", types.SimpleNamespace
    cpu = {"current_platform": space(is_cpu=lambda: True)}
    given = vars(source.cut(f"{folder}/common.py", "ApplyRotaryEmb", **cpu))
    given["rocm_aiter_ops"] = space(is_triton_rotary_embed_enabled=lambda: False)
    code = source.cut(f"{folder}/base.py", "RotaryEmbeddingBase", "RotaryEmbedding", **given)
    yield from _serving(source, folder, code.RotaryEmbedding, SERVING["vllm"])


def sglang(source: Source) -> Iterator[Case]:
    """Yield cases with SGLang's `forward_native`."""
    folder, space = "sglang/srt/layers/rotary_embedding", types.SimpleNamespace
    names = "cuda hip xpu npu musa mps cpu_amx_available".split()
    given: dict[str, Any] = {"_is_cpu": True, **{f"_is_{name}": False for name in names}}
    given |= {"_use_aiter": False, "current_platform": None, "publish_role": lambda: None}
    given["envs"] = space(SGLANG_ROPE_CACHE_FP32=space(get=lambda: False))
    given |= vars(source.cut(f"{folder}/utils.py", "apply_rotary_emb"))
    names = ["RotaryEmbedding", "LinearScalingRotaryEmbedding"]
    code = source.cut(f"{folder}/base.py", *names, **given)
    yield from _serving(source, folder, code.RotaryEmbedding, SERVING["sglang"])


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


def compared(stack: stacks.Stack, spec: RopeSpec, rotation: Rotation, dtype: Any) -> list[int]:
    """Compare `rotation`, another library's, with `rotate_qk` under a stack.

    Returns:
        The number of elements of the results, which is also that of the gradients; how many
        elements of the results differ; and how many of the gradients.
    """
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, TOKENS, heads, 64) for heads in (HEADS, 1) * 2]
    draws = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    ids = (torch.arange(TOKENS) * 67 + 5).expand(2, -1)
    # Of a step, or configured.
    longest = int(ids.max()) + 1 if stack.name.startswith("sglang") else 4096
    rope = spec.at(ids, stack=stack, seq_len=longest if spec.by_length else None)
    ends = []
    for rotate in (lambda q, k: rotation(q, k, ids), partial(rotate_qk, rope=rope, layout="bshd")):
        xs = [x.clone().requires_grad_() for x in draws[:2]]
        ys = rotate(*xs)
        ends.append((ys, torch.autograd.grad(ys, xs, draws[2:])))
    differ = [
        sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))
        for one, other in zip(*ends, strict=True)
    ]
    return [sum(x.numel() for x in draws[:2]), *differ]


HEADINGS = (
    "name",
    "verified",
    "library",
    "tables",
    "rounding",
    "rules besides the default",
    "source",
)


def table() -> str:
    """Return the table of all stacks for docs/parity.md."""
    rows = []
    for stack in map(stacks.get, stacks.names()):
        rules = ", ".join(
            sorted(
                frequencies.RULES[name].__name__
                for name in stack.rules
                if name in frequencies.RULES
            )
        )
        kept = "the dtype of x" if stack.table_dtype is None else "float32"
        rounding = ", ".join(dict.fromkeys(stack.rounding))
        facts = stack.verified, stack.about, kept, rounding, rules or "none", stack.source
        rows.append((f"`{stack.name}`", *facts))
    return "\n".join(pages.table(HEADINGS, rows))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage.stacks", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", help="the libraries' source; none to write the page only"
    )
    options = parser.parse_args(arguments)
    pages.between_marks(PAGE, "stacks", table())
    if options.folder is None:
        return
    found: dict[str, Any] = {}
    for name in STACKS:
        stack = stacks.get(name)
        found[name] = {"source": stack.source, "torch": torch.__version__}
        every = STACKS[name](Source(options.folder))
        kinds = ("", CAST) if name in CASTS else ("",)
        for (case, spec, rotation), cast_, dtype in itertools.product(every, kinds, DTYPES):
            how = (stack.cast(dtype), dtype) if cast_ else (stack, None)
            counts = compared(how[0], spec, lambda *given: rotation(*given, how[1]), dtype)  # noqa: B023
            found[name][label := f"{case}{cast_}, {str(dtype)[6:]}"] = counts
            sys.stdout.write(f"{name}: {label}: {counts}\n")
    RESULTS.write_text(pages.written(dict(sorted(found.items()))), encoding="utf-8")


if __name__ == "__main__":
    main()
