"""Choose the mutants, and build a copy of the source with one of them.

Python files are changed by their syntax tree, C++ files by regular expressions. Error messages,
types and comments stay unchanged. The mutants of a file depend only on its name and text.
"""

import ast
import collections
import contextlib
import importlib.util
import io
import random
import re
import shutil
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# Parts of src/, and the number of lines for each of which one mutant is chosen.
PYTHON = dict.fromkeys("angles.py frequencies positions ops backends/reference.py".split(), 44)
PYTHON |= dict.fromkeys(
    "config functional integrations nn patching phases spec stacks".split(), 150
)
PYTHON = {f"tightrope/{name}": lines for name, lines in PYTHON.items()} | {"tightrope_tools": 150}
LOOPS = (
    "formats.h heads.h angles.h angle_sums.h gate_sums.h stages.h stage_rows.h acts.h rotate_loops.h overlap.h "
    "registers.h vectors.h fast_acts.h norms.h stage_lines.h bind_problem.h bind_stages.h bind_gradients.cpp"
).split()

_PAIRS = (
    "Add Sub|Mult Div|LShift RShift|BitAnd BitOr|Lt LtE|Gt GtE|Eq NotEq|Is IsNot|In NotIn|And Or"
)
OPPOSITE = {"FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult"}
for _pair in _PAIRS.split("|"):
    _a, _b = _pair.split()
    OPPOSITE |= {_a: _b, _b: _a}
DTYPES = {"float64": "float32", "float32": "float64", "int64": "int32", "int32": "int64"}
NUMBERS = ("float", "int", "Tensor", "torch.Tensor")


def changes(node, returns):
    """Yield (kind, new text) for each change to a node.

    `returns` is the return annotation of the function that contains the node.
    """

    def spelled(kind, **fields):
        yield kind, f"({ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))})"

    def opposite(operator):
        return getattr(ast, OPPOSITE[type(operator).__name__])()

    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op).__name__ in OPPOSITE:
        yield from spelled(type(node.op).__name__, op=opposite(node.op))
    elif isinstance(node, ast.Compare):
        yield from spelled("compare", ops=[opposite(node.ops[0]), *node.ops[1:]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "unary", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", str(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield from spelled("branches", body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        # Swapping other arguments mostly gives a TypeError.
        plain = all(isinstance(a, (ast.Name, ast.Attribute, ast.BinOp)) for a in node.args[:2])
        if plain and ast.unparse(node.func) not in ("isinstance", "zip"):
            yield from spelled("arguments", args=[node.args[1], node.args[0], *node.args[2:]])
    elif isinstance(node, ast.Attribute) and node.attr in DTYPES:
        yield from spelled("dtype", attr=DTYPES[node.attr])
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        yield "pair", ast.unparse(ast.Return(ast.Tuple(node.value.elts[::-1], ast.Load())))
    elif isinstance(node, ast.Return) and returns in NUMBERS:
        yield "negated", f"return -({ast.unparse(node.value)})"
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "deleted", "pass"


def candidates(node, returns=None, inside=False):
    """Yield (node, kind, text) for each change below a node, except in error messages and types."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Raise, ast.JoinedStr)):
                continue
            function = isinstance(child, ast.FunctionDef)
            if function and child.name == "__repr__":
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if inside or isinstance(child, ast.Constant):
                yield from ((child, *change) for change in changes(child, returns))
            if isinstance(child, ast.If) and isinstance(child.body[-1], ast.Raise):
                yield child.test, "check", "False"
            kind = child.returns and ast.unparse(child.returns) if function else returns
            yield from candidates(child, kind, inside or function)


def python_lines(text):
    """Yield (line number, kind, changed line) for each change within a single line."""
    lines = text.splitlines()
    for node, kind, new in candidates(ast.parse(text)):
        if node.lineno == node.end_lineno:
            old = lines[node.lineno - 1].encode()
            after = old[: node.col_offset] + new.encode() + old[node.end_col_offset :]
            if after != old:
                yield node.lineno, kind, after.decode()


SWAPS = (
    "turned_u turned_v;in_stride out_stride;cosine sine;even odd;true false;== !=;&& \\|\\|;c s;u v"
)
TOKENS = [
    *(("add", r"(?<=[\w\])] )\+(?= )", "-"), ("add", r"(?<=[\w\])] )-(?= )", "+")),
    *(("product", r"(?<=[\w\])] )\*(?= )", "+"), ("product", r"(?<=[\w\])] )/(?= )", "*")),
    *(("tail", r"; (\w+) < ", r"; \1 + 1 < "), ("tail", "<= n", "< n"), ("sum", r"\+=", "-=")),
    *(("one", r"\b1\b", "2"), ("one", r"\b0\b", "1"), ("negate", r"(?<=[(,] )?-(?=[\w(])", "")),
    ("branches", r"\? ([^:?]+) : ([^:?;,)]+)", r"? \2 : \1"),
]
for _pair in SWAPS.split(";"):
    for _a, _b in (_pair.split(), _pair.split()[::-1]):
        _pattern = rf"\b{_a}\b(?=\[|,|\)|\()" if _a.isidentifier() else _a
        TOKENS.append(("swap " + _pair.split()[0], _pattern, _b.replace("\\", "")))
_SKIPPED = (
    r"\s*(//|#|STD_TORCH|template|static|struct|using|inline|case|TIGHTROPE|const \w+&|\}|ask)"
)


def loop_lines(text):
    """Yield (line number, kind, changed line) for each change to a line of C++.

    Lines between `#else`, or a condition on `__AVX512F__`, and the next directive are left out.
    """
    elsewhere = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            elsewhere = line.startswith("#else") or "__AVX512F__" in line
        whole = "{ return" in line and not line.lstrip().startswith("//")
        if elsewhere or not (whole or (line.startswith(" ") and not re.match(_SKIPPED, line))):
            continue
        for kind, pattern, new in TOKENS:
            code = line.split("//")[0]
            for match in re.finditer(pattern, code):
                yield number, kind, line[: match.start()] + match.expand(new) + line[match.end() :]


def choose(path):
    """Yield the mutants of a file: kinds in turn, at most one per line, the same in every run."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    every = next((n for part, n in PYTHON.items() if name.startswith(f"src/{part}")), 0)
    found = sorted(set((python_lines if path.suffix == ".py" else loop_lines)(text)))
    chance = random.Random(name)
    chance.shuffle(found)
    lines, used, taken = text.splitlines(), collections.Counter(), set()
    count = 3 if path.suffix != ".py" else -(-len(lines) // every) if len(lines) > 45 else 0
    while found and len(taken) < count:
        number, kind, after = min(found, key=lambda one: used[one[1]])
        before = lines[number - 1]
        used[kind] += 1
        taken.add(number)
        found = [one for one in found if one[0] != number]
        place = {"file": name, "line": number, "at": lines[: number - 1].count(before)}
        yield {**place, "kind": kind, "before": before, "after": after}


def source_files():
    for name in PYTHON:
        where = ROOT / "src" / name
        files = [where] if where.is_file() else sorted(where.rglob("*.py"))
        if not files:
            raise FileNotFoundError(f"{where} holds no source")
        yield from files
    yield from (ROOT / "csrc" / name for name in LOOPS)


def changed(text, mutant):
    """Return the text with the mutant's line, or None if the original line is gone."""
    lines = text.splitlines()
    places = [n for n, line in enumerate(lines) if line == mutant["before"]]
    if len(places) <= mutant["at"]:
        return None
    lines[places[mutant["at"]]] = mutant["after"]
    return "\n".join(lines) + "\n"


def build(mutant, text, folder, isa):
    """Build the library with one changed file of csrc/, and return whether it compiles.

    Only units that include the file are compiled; of the loops, only those for instruction set
    `isa`.
    """
    spec = importlib.util.spec_from_file_location("tightrope_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    with mock.patch("setuptools.setup"):
        spec.loader.exec_module(setup)
    name = Path(mutant["file"]).name
    units = [name.removesuffix(".cpp")] if name.endswith(".cpp") else [f"rotate_{isa}"]
    if name in ("bind_problem.h", "bind_stages.h", "overlap.h"):
        units = ["bind_torch", *(["bind_gradients"] if name == "bind_problem.h" else [])]
    if not list(setup.OBJECTS.glob(f"rotate_{isa}-*.o")):
        setup.build_library()
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "csrc" / name).write_text(text)

    def produce(stem, _, suffix, command):
        if suffix == ".o" and stem not in units:
            return next(setup.OBJECTS.glob(f"{stem}-*.o"))
        command = ["-O1" if part == "-O3" else part for part in command]
        setup.run_compiler([*command, "-o", str(folder / (stem + suffix))])
        return folder / (stem + suffix)

    setup.CSRC, setup.JOBS, setup.produce = folder / "csrc", 1, produce
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # compiler warnings about a mutant
            shutil.copy2(setup.build_library(), folder / "src/tightrope" / setup.LIBRARY)
    except setup.NotBuilt:
        return False
    return True
