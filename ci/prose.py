"""Check the wording of docstrings, comments, messages and pages.

It prints `file:line: "found": write replacement` for each word or phrase that this project replaces
by another, then a count per folder and each exception that is no longer needed. It exits with 1 if
it found a phrase or such an exception. Code in backticks, names of arguments, doctests and strings
of one or two words are not checked.
"""

import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = {
    r"as of(?= [`:])": "see X, as in X, like X",
    r"whoever|nobody|somebody|everybody|anybody|he who": "the caller, the function, code that ...",
    r"said|told|spoken of": "given, specified, stated",
    r"carried(?! out)": "extra tensors (weights, gates, learned frequencies)",
    r"ramps?": "add the token index",
    r"what (stands|stood) around|outer(?!\.h| loop| level| product| dim| ax| function)": "f and P",
    r"what (stands|stood)(?! around)": "a noun: the value, the prefix",
    r"(has|have|with) no numbers|without numbers": "has no data",
    r"what (is|are) no": "an invalid ...",
    r"asked of|it is asked": "name the caller, function or tensor that does it",
    r"nothing (is )?assumed of": "no silent misuse",
    r"without a word": "silently",
}
PATTERNS = {
    re.compile(rf"\b(?:{phrase})\b(?![(=])".replace(" ", r"\s+"), re.I): use
    for phrase, use in PHRASES.items()
}
FIRST_WORD = re.compile(r"\s*(What|Which|Whether|Who|Whose|Of|How|Why)\b")
IGNORED = re.compile(r"(`+)[^`]+?\1|^ +\w+(, \w+)*:(?= )|^ *(>>>|\.\.\.) .*", re.M)

YARN = "the name that YaRN's paper gives its blend of frequencies"
NESTED = "the enclosing part of a nested configuration"
# (file, found) -> the reason why it stays.
EXCEPTIONS = {
    ("docs/audit.md", "ramp"): YARN,
    ("src/tightrope/frequencies/_blend.py", "ramp"): YARN,
    ("tests/unit/frequencies/test_rules.py", "ramp"): YARN,
    ("tests/unit/frequencies/test_rules_of_transformers.py", "ramp"): YARN,
    ("tests/unit/stacks/test_stacks.py", "ramp"): YARN,
    ("tests/support/tolerances.py", "ramp"): YARN,
    ("src/tightrope/config/keys.py", "outer"): NESTED,
    ("ci/families.py", "outer"): NESTED,
}
UNCHECKED = {"ci/prose.py", "tests/repository/test_prose.py"}  # they contain the phrases


def passages(name, text):
    """Yield (line, text, whether it is a docstring) for the prose of a file."""
    if name.endswith(".md"):
        yield 1, text, False
    elif name.endswith((".h", ".cpp")):
        yield 1, "\n".join(line.partition("//")[2] for line in text.splitlines()), False
    elif name.endswith(".py"):
        nodes = list(ast.walk(ast.parse(text)))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and str(node.value).count(" ") > 1:
                yield node.lineno, str(node.value), node in docstrings
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {
            token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT
        }
        # All comments are one passage, as a phrase may continue on the next line.
        lines = (comments.get(at + 1, "").lstrip("#: ") for at in range(len(text.splitlines())))
        yield 1, "\n".join(lines), False


def problems(name, text):
    """Yield (line, found, replacement) for each phrase to replace in a file."""
    for line, passage, is_docstring in passages(name, text):
        prose = IGNORED.sub(lambda code: "``" + "\n" * code[0].count("\n"), passage)
        first = FIRST_WORD.match(passage) if is_docstring else None
        if first:
            yield line, first[1], "an imperative or a noun phrase as first words"
        for pattern, use in PATTERNS.items():
            for found in pattern.finditer(prose):
                at = line + prose.count("\n", 0, found.start())
                yield at, " ".join(found[0].split()), use


def main():
    """Print the problems of all files; return the exit code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts, unused = collections.Counter(), set(EXCEPTIONS)
    names = {*listed.split()}
    if not names > UNCHECKED:
        print(f"UNCHECKED names files that do not exist: {', '.join(sorted(UNCHECKED - names))}")
        return 1
    for name in sorted(names - UNCHECKED):
        if not name.endswith((".md", ".py", ".h", ".cpp")):
            continue
        for line, found, use in sorted(problems(name, (ROOT / name).read_text("utf-8"))):
            if (name, found.lower()) in EXCEPTIONS:
                unused.discard((name, found.lower()))
            else:
                print(f'{name}:{line}: "{found}": write {use}')
                counts["/".join(name.split("/")[:-1][:3])] += 1
    for folder, count in sorted(counts.items()):
        print(f"{count:5} in {folder or '.'}")
    for name, found in sorted(unused):
        print(f'{name}: "{found}" no longer occurs: delete the exception')
    return 1 if counts or unused else 0


if __name__ == "__main__":
    sys.exit(main())
