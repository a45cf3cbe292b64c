"""Print how the code reads, in figures: names, sizes, folders, import circles, and the English of its prose.

    python tools/measure_readability.py [PACKAGE] [--prose] [--names]

``--prose`` lists every line of prose with one of the constructions that this project avoids; ``--names`` lists the
names that are defined most often. Nothing gates on these figures: they show where to look.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Nine constructions that make a reader stop, each with the pattern that finds it. They are counted generously: any
# "what" that does not end in a question counts, for instance.
CONSTRUCTIONS = {
    "what-clause as a noun": r"\bwhat(?:ever)?\b",
    "nobody, somebody, whoever": r"\b(?:nobody|somebody|anybody|everybody|whoever)\b",
    "of which, to which, behind which": r"\b(?:of|to|behind|from|with|by|for|in|on|at|after|before|between|under|over)"
    r" (?:which|whose|whom)\b",
    "behind for after": r"\bbehind\b",
    "go on for continue": r"\b(?:go|goes|going|went|gone) on\b",
    "so many, so much": r"\bso (?:many|much)\b",
    "is to VERB": r"\b(?:is|are|was|were) (?:not )?to (?!the\b|a\b|an\b)[a-z]+\b",
    "beside for besides or during": r"\bbeside\b",
    "told, tells of, wish": r"\btold\b|\btells? of\b|\bwish(?:es|ed)?\b",
}  # fmt: skip


def load_trees(package: Path) -> dict[Path, ast.Module]:
    """Parse every Python file of a package."""
    return {file: ast.parse(file.read_text("utf-8")) for file in sorted(package.rglob("*.py"))}


def functions_of(trees: dict[Path, ast.Module]) -> list[FunctionNode]:
    """Return every function and method but for dunders."""
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    return [node for node in nodes if isinstance(node, FunctionNode) and not re.fullmatch(r"__\w+__", node.name)]


def read_prose(file: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each line of a docstring or comment."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0].lineno
            for offset, line in enumerate(str(ast.get_docstring(node, clean=False)).split("\n")):
                yield first + offset, line
    for token in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def imported_modules(tree: ast.Module, file: Path, package: Path, types_only: bool) -> set[Path]:
    """Return the files of the package that a file imports, with or without those that only a type checker reads."""
    unread: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            unread |= set(ast.walk(node))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in unread and not types_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = list(file.relative_to(package.parent).parts[: -node.level]) if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    circle_members: set[Path] = set()
    for name in names:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            target = package.parent.joinpath(*parts[:length])
            if target.with_suffix(".py").is_file():
                circle_members.add(target.with_suffix(".py"))
                break
            if (target / "__init__.py").is_file():
                circle_members.add(target / "__init__.py")
                break
    return circle_members - {file}


def count_circles(imports: dict[Path, set[Path]]) -> int:
    """Count the groups of two or more files that import each other, directly or through others."""

    def reach(start: Path) -> set[Path]:
        seen: set[Path] = set()
        new = {start}
        while new:
            new = set().union(*(imports.get(file, set()) for file in new)) - seen
            seen |= new
        return seen

    reached = {file: reach(file) for file in imports}
    groups = {frozenset(other for other in reached[file] if file in reached[other]) for file in imports}
    return sum(len(group) > 1 for group in groups)


def print_names(package: Path, trees: dict[Path, ast.Module]) -> None:
    """Print sizes, names and structure."""
    lengths = sorted(len(file.read_text("utf-8").splitlines()) for file in trees)
    functions = functions_of(trees)
    sizes = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in functions)
    public = [node for node in functions if not node.name.startswith("_")]
    typed = [
        node
        for node in functions
        if node.returns and all(arg.annotation or arg.arg in ("self", "cls") for arg in node.args.args)
    ]
    folders = Counter(file.parent for file in trees if file.name != "__init__.py")
    fullest, files = folders.most_common(1)[0]
    at_run_time = {file: imported_modules(tree, file, package, False) for file, tree in trees.items()}
    with_types = {file: imported_modules(tree, file, package, True) for file, tree in trees.items()}
    many = sum(len(node.args.args) + len(node.args.kwonlyargs) >= 6 for node in functions)
    percent = 100 / len(functions)
    unique = sum(names[node.name] == 1 for node in functions)
    one_word = sum("_" not in node.name.strip("_") for node in functions)
    documented = sum(map(bool, map(ast.get_docstring, public))) / len(public)
    introduced = sum(map(bool, map(ast.get_docstring, trees.values()))) / len(trees)
    rows = {
        "files": f"{len(trees)}, {statistics.median(lengths):.0f} lines in the median, {lengths[-1]} at most",
        "functions": f"{len(functions)}, {statistics.median(sizes):.0f} lines in the median, "
        f"{sizes[int(len(sizes) * 0.99)]} at p99, {sizes[-1]} at most",
        "functions over 60 lines": f"{percent * sum(size > 60 for size in sizes):.2f} %",
        "largest class": f"{max((node.end_lineno or 0) - node.lineno + 1 for node in classes)} lines",
        "functions with 6 parameters or more": f"{percent * many:.1f} %",
        "definitions with a name of their own": f"{percent * unique:.0f} %",
        "one-word function names": f"{percent * one_word:.0f} %",
        "public functions with a docstring": f"{100 * documented:.0f} %",
        "modules with a docstring": f"{100 * introduced:.0f} %",
        "fully typed functions": f"{percent * len(typed):.0f} %",
        "fullest folder": f"{files} files in {fullest.relative_to(package.parent)}",
        "import circles": f"{count_circles(at_run_time)} at run time, {count_circles(with_types)} with types",
    }
    for name, value in rows.items():
        print(f"{name:<38}{value}")


def print_prose(trees: dict[Path, ast.Module], show_lines: bool) -> None:
    """Print the constructions per 1,000 words, and with ``show_lines`` each line that has one."""
    words, counts = 0, dict.fromkeys(CONSTRUCTIONS, 0)
    for file, tree in trees.items():
        for number, line in sorted(read_prose(file, tree)):
            text = re.sub(r"``[^`]*``|`[^`]*`", "", line)
            words += len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))
            for name, pattern in CONSTRUCTIONS.items():
                hits = len(re.findall(pattern, text, re.IGNORECASE))
                counts[name] += hits
                if hits and show_lines:
                    print(f"{file}:{number}: [{name}] {text.strip()}")
    print(f"\nprose: {words:,} words; constructions per 1,000 words")
    for name, count in [*counts.items(), ("together", sum(counts.values()))]:
        print(f"{name:<38}{1000 * count / max(1, words):.2f}")


def main() -> None:
    """Measure the package that the first argument names, or parley."""
    arguments = [word for word in sys.argv[1:] if not word.startswith("--")]
    package = Path(arguments[0] if arguments else Path(__file__).parents[1] / "parley").resolve()
    trees = load_trees(package)
    print_names(package, trees)
    if "--names" in sys.argv:
        names = Counter(node.name for node in functions_of(trees))
        print("\n" + ", ".join(f"{name} {count}" for name, count in names.most_common(60)))
    print_prose(trees, "--prose" in sys.argv)


if __name__ == "__main__":
    main()
