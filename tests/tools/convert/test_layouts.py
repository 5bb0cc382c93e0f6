"""What conversion makes of the tensors of a layout, and which checkpoints it refuses: laws over the rows of layouts.jsonl.

A row changes its `base`. A tensor has a shape, or the letters of its heads in the order of its rows (queries, keys,
values, gates; `|` begins another row of a matrix of heads) and the number of its columns, which is 32; `:` alone is
none. In names, `*` stands for each of `layers`; null removes all tensors whose names begin so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import contents, interleaved_rows, llama_tensors, write
from tests.support.rows import read_rows
from tests.support.tolerances import TABLE
from tightrope_tools.convert import Conversion, Stated, convert, detect

Tensors = dict[str, torch.Tensor]
WIDTH = 8
ROWS = read_rows(Path(__file__).with_name("layouts.jsonl"), "config", "stated", "tensors")
LISTS = r"one of llama,|one of the roles q,|\[from_config\]"
REFUSED = {name: row for name, row in ROWS.items() if row.get("error")}


def tensors_of(row: dict[str, Any]) -> tuple[Tensors, dict[str, list[int]]]:
    """Return random tensors, and the first rotated row of each head in those that rotate."""
    layout: dict[str, Any] = {}
    for name, value in row["tensors"].items():
        for layer in range(row.get("layers", 1)):
            each = name.replace("*", str(layer))
            layout[each] = value
            if value is None:
                layout = {key: kept for key, kept in layout.items() if not key.startswith(each)}
    made, starts = {}, {}
    for name, value in layout.items():
        shape = value
        if isinstance(value, dict):
            shape, starts[name] = value["shape"], value["starts"]
        elif isinstance(value, str):
            width, (letters, colon, columns) = row.get("head_dim", WIDTH), value.partition(":")
            heads = letters.replace("|", "")
            starts[name] = [
                n * width + row.get("start", 0) for n, one in enumerate(heads) if one in "qk"
            ]
            shape = [len(heads) * width, int(columns or 32)][: 1 if colon and not columns else 2]
            if "|" in letters:
                shape = [letters.count("|") + 1, -1]
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        size = len(heads) * width if -1 in shape else shape
        x = torch.randn(size, generator=generator).reshape(shape)
        made[name] = x.to(getattr(torch, row.get("dtype", "float32")))
    return made, {name: each for name, each in starts.items() if each}


def checkpoint_of(row: dict[str, Any], folder: Path, tensors: Tensors) -> Path:
    """Write a checkpoint to a folder; return the folder, or the file that the row names."""
    write(folder, tensors, row["config"] or None, shards=row.get("shards", 1))
    if "file" not in row:
        return folder
    return (folder / "model.safetensors").rename(folder / row["file"])


def converted(row: dict[str, Any], path: Path, out: Path, **more: Any) -> Conversion:
    other = "half" if row["stated"].get("source") == "interleaved" else "interleaved"
    options = {"to": row.get("to", other), "verify": row.get("verify", True), **more}
    return convert(path, out, stated=Stated(**row["stated"]), **options)


def loaded(path: Path) -> Tensors:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def moved(x: torch.Tensor, starts: Sequence[int], width: int, to: str) -> list[Any]:
    """Return the rows of a tensor as they are for the other pairing; a matrix of heads has one per element."""
    rows = (x.flatten() if x.shape[0] < width else x).tolist()
    if to == "interleaved":
        return interleaved_rows(rows, starts, width)
    numbers = interleaved_rows(range(len(rows)), starts, width)
    return [rows[numbers.index(n)] for n in range(len(rows))]


@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_rows_of_rotated_heads_move_and_all_else_stays(name: str, tmp_path: Path) -> None:
    """The way back gives the original bytes. The proof finds scores unchanged, and notices the other pairing."""
    row = ROWS[name]
    before, starts = tensors_of(row)
    source = checkpoint_of(row, tmp_path / "a", before)
    kept = contents(tmp_path / "a")
    there, again = (tmp_path / name for name in "bc")
    if source.is_file():
        there.mkdir()
        again.mkdir()
        there, again = there / source.name, again / source.name
    done = converted(row, source, there)
    assert set(done.changed) == starts.keys()
    assert set(done.left) == before.keys() - starts.keys()
    assert list(done.layers_without_rope) == row.get("still", [])
    if row.get("verify", True):
        assert done.verified is not None
        assert done.verified.unswitched > TABLE["other pairing"].value
    after = loaded(there)
    assert after.keys() == before.keys()
    for each, x in before.items():
        assert after[each].shape == x.shape
        width = row.get("width", WIDTH)
        wanted = moved(x, starts[each], width, done.to) if each in starts else x.flatten().tolist()
        found = after[each] if isinstance(wanted[0], list) else after[each].flatten()
        assert found.tolist() == wanted, each
        assert each not in starts or not torch.equal(after[each], x)
    back = {**row, "stated": {**row["stated"], "source": None}}
    if source.is_file() or not row["config"]:  # no configuration beside the file of the result
        back["stated"].setdefault("config", row["config"] or None)
    converted(back, there, again, to=done.source)
    assert contents(tmp_path / "a") == kept
    same = {source.name: kept[source.name]} if source.is_file() else kept
    assert contents(tmp_path / "c") == same


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    row = REFUSED[name]
    path = checkpoint_of(row, tmp_path / "a", tensors_of(row)[0])
    before = contents(tmp_path)
    with pytest.raises((ValueError, TypeError)) as caught:
        converted(row, path, tmp_path / f"b{path.suffix}")
    assert row["error"] in str(caught.value)
    assert str(caught.value).startswith("[")
    # Lists of namings and of roles, and advice of `from_config`, may be longer.
    assert len(str(caught.value).split()) <= 26 or re.search(LISTS, str(caught.value))
    assert contents(tmp_path) == before
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    if row.get("detect", True):
        with pytest.raises((ValueError, TypeError)) as caught:
            detect(path, stated=Stated(**row["stated"]))
        assert row["error"] in str(caught.value)


# --- drawn layouts --------------------------------------------------------------------------------

COLUMNS = {"weight": "3", "bias": "", "weight_scale": "1", "lora_B.weight": "2"}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), packing=st.sampled_from("separate gated blocks grouped quarters".split()))
def test_every_packing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, packing: str
) -> None:
    """The rows of each head move within it, and any other number of rows is refused."""
    kv_heads, group, pairs = (data.draw(st.integers(1, most)) for most in (3, 3, 5))
    start, rest = (data.draw(st.integers(0, most)) for most in (3, 2))
    to = data.draw(st.sampled_from(["half", "interleaved"]))
    if packing == "quarters":
        kv_heads, group = 4 * kv_heads, 1
    heads, head_dim = kv_heads * group, start + 2 * pairs + rest
    quarter = "".join(kind * (heads // 4) for kind in "qvk")
    orders = {
        "blocks": "q" * heads + "k" * kv_heads + "v" * kv_heads,
        "grouped": ("q" * group + "kv") * kv_heads,
        "quarters": 4 * quarter,
    }
    fused, query = packing in orders, "qg" if packing == "gated" else "q"
    separate = {"self_attn.q_proj": query * heads, "self_attn.k_proj": "k" * kv_heads}
    modules = {"attention.query_key_value": orders[packing]} if fused else separate
    layout = {
        f"layers.0.{module}.{suffix}": f"{letters}:{columns}"
        for module, letters in modules.items()
        for suffix, columns in COLUMNS.items()
    }
    naming = "gpt_neox" if fused else {"gated": "qwen3_next", "separate": "llama"}[packing]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": 2 * pairs}
    stated = {**sizes, "start": start, "naming": naming, "packing": packing if fused else None}
    stated["source"] = "half" if to == "interleaved" else "interleaved"
    row = {"head_dim": head_dim, "start": start, "config": None, "verify": False, "to": to}
    row |= {"tensors": layout, "stated": stated}
    before, starts = tensors_of(row)
    folder = tmp_path_factory.mktemp("packing")
    converted(row, checkpoint_of(row, folder / "a", before), folder / "b")
    after = loaded(folder / "b")
    for name, x in before.items():
        wanted = moved(x[:, None] if x.dim() == 1 else x, starts[name], 2 * pairs, to)
        assert after[name].reshape(len(x), -1).tolist() == wanted

    name = data.draw(st.sampled_from(sorted(before)))
    total = len(before[name])
    # One scale is that of the whole tensor, and stays.
    least = 2 if name.endswith("scale") else 1
    got = data.draw(st.integers(least, 3 * total).filter(lambda rows: rows != total))
    wrong = before | {name: torch.ones(got, *before[name].shape[1:])}
    row["shards"] = 2
    end = r"\.$" if total % got else f": merge the {total // got} ranks' parts first"
    with pytest.raises(
        ValueError, match=rf" heads of {head_dim} = {total} rows but has {got}{end}"
    ):
        converted(row, checkpoint_of(row, folder / "c", wrong), folder / "d")
    assert not (folder / "d").exists()


# --- tensors that the naming does not list --------------------------------------------------------

IN_ATTENTION = """
    k_cache_scale k_scale attn.key_scale q_scale.weight q_conv1d.weight k_conv.bias q_bias query_bias gamma_q
    q_head_norm.weight qkv_bias k_gain qconv.weight key.weight inner.Q_shift q_layernorm.weight query_layernorm.weight
    norm_k.weight ln_q.weight k_ln.weight q_rms.weight norm.query_norm.weight norm.key_norm.weight
""".split()
NAMES = [f"self_attn.{name}" for name in IN_ATTENTION]
NAMES += ["k_conv.weight", "q_head_norm.weight", "q_layernorm.weight"]


@pytest.mark.parametrize("name", NAMES)
def test_other_channels_of_queries_or_keys_are_refused(name: str, tmp_path: Path) -> None:
    """Left in place, they would scale or shift the wrong channels. Single numbers stay."""
    there, tensors = f"model.layers.1.{name}", llama_tensors(bias=False)
    shape = (16, 1, 4) if "conv" in name and "weight" in name else (16,)
    source = write(tmp_path / "a", tensors | {there: torch.rand(shape)})
    stated = Stated(naming="llama")
    for refuse in (
        lambda: convert(source, tmp_path / "b", to="interleaved", stated=stated),
        lambda: detect(source, stated=stated),
    ):
        with pytest.raises(ValueError, match=f"{there} is named like .* of queries or keys, and "):
            refuse()
    save_file(tensors | {there: torch.rand(1)}, source / "model.safetensors")
    assert there in convert(source, tmp_path / "b", to="interleaved").left


# --- damaged configurations -----------------------------------------------------------------------

JUNK: list[Any] = [
    *(True, -1, 0, 1.5, "x", "", [], [[]], [None], ["x"], [-1], {}, 10**30, [10**30]),
    *({"0": {}}, {"0": []}, {"0": {"head_dim": []}}, {"x": {"head_dim": 1}}),
    *({"9" * 5000: {"head_dim": 1}}, {"1": {"num_key_value_heads": [2]}}),
    *({"tp_size": []}, {"num_attention_heads": {}}),
    *([{"attention": []}], [{"attention": {"n_heads_in_group": "x"}}]),
]
KEYS = """
    num_attention_heads num_key_value_heads num_key_value_heads_per_layer kv_lora_rank mapping tp_size v_head_dim
    swa_head_dim head_dim_per_layer attention_other_setting per_layer_config block_configs attn_config gating
    multi_query swa_num_key_value_heads num_hidden_layers
""".split()


@pytest.mark.parametrize("key", KEYS)
def test_damaged_values_are_reported(tmp_path: Path, key: str) -> None:
    row = ROWS["fused"]
    path = tmp_path / "a.safetensors"
    save_file(tensors_of(row)[0], path)
    for value in JUNK:
        stated = Stated({**row["config"], "head_dim": 8, key: value}, source="half")
        try:
            convert(path, tmp_path / "b.safetensors", to="interleaved", stated=stated, dry_run=True)
        except (ValueError, TypeError) as error:
            assert str(error).startswith("[")  # noqa: PT017


def test_statements_are_no_mapping(tmp_path: Path) -> None:
    source = write(tmp_path / "a", llama_tensors())
    with pytest.raises(ValueError, match=r"must be a Stated, such as Stated\(source='half'\), but"):
        convert(source, tmp_path / "b", to="interleaved", stated={"heads": 4})  # type: ignore[arg-type]
