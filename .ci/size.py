"""Measures the size of `pipeline` and `stages`, and fails above the limits of `size.toml`.

A change that needs more raises the number in the same commit, with its reason in the message.

    python .ci/size.py            # check
    python .ci/size.py --rooms    # lines, files and functions of each folder
    python .ci/size.py --untested # modules without a test file of their name
    python .ci/size.py stages/data  # the same figures of some folders only
"""

import ast
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "stages")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[Path]:
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return sorted(file for file in files if "__pycache__" not in file.parts)


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def functions(files: list[Path]) -> list[int]:
    """The number of lines of each function, nested ones and methods included."""
    return [
        node.end_lineno - node.lineno + 1
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None
    ]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, modules: set[str]) -> Iterator[str]:
    """The project's modules that a file imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def one_importer() -> list[str]:
    """Modules that exactly one other module of the packages imports."""
    files = sources(*PACKAGES)
    modules = {module_of(file) for file in files}
    importers = defaultdict(set)
    for file in files:
        for name in imports(file, modules):
            importers[name].add(module_of(file))
    packages = {module_of(file) for file in files if file.name == "__init__.py"}
    return sorted(
        name for name in modules - packages if len(importers[name] - {name} - packages) == 1
    )


def untested() -> list[str]:
    """Modules without a file of tests of their name: tests/pipeline/x/test_y.py for
    pipeline/x/y.py."""
    files = [file.relative_to(ROOT) for file in sources(*PACKAGES) if file.name != "__init__.py"]
    tests = {file: ROOT / "tests" / file.with_name(f"test_{file.name}") for file in files}
    return [module_of(ROOT / file) for file, test in tests.items() if not test.exists()]


def figures() -> dict[str, float]:
    files = sources(*PACKAGES)
    length = functions(files)
    planners = [file for file in sources("stages") if is_prediction(file)]
    total = lines(files)
    return {
        "lines": total,
        "files": len(files),
        "functions_per_1000_lines": round(1000 * len(length) / total, 1),
        "modules_with_one_importer": len(one_importer()),
        "lines_of_prediction": lines(sources("pipeline/planning") + planners),
        "lines_of_importing": lines(sources("pipeline/importing", "stages/importing")),
        "lines_of_tests": lines(sources("tests")),
        "modules_without_tests_of_their_name": len(untested()),
    }


def is_prediction(file: Path) -> bool:
    return "planner" in file.stem or file.stem in PREDICTION


def show(folders: list[str]) -> None:
    for folder in folders:
        files = sources(folder)
        if not files:
            continue
        length, total = functions(files), lines(files)
        median = statistics.median(length) if length else 0
        print(
            f"{folder:28} {total:6} lines {len(files):4} files {len(length):5} functions "
            f"(median {median:g}, {1000 * len(length) / total:.0f} per 1,000 lines)"
        )


def main(arguments: list[str]) -> int:
    if arguments == ["--rooms"]:
        rooms = sorted(path for name in PACKAGES for path in (ROOT / name).iterdir())
        show([str(path.relative_to(ROOT)) for path in rooms if path.is_dir()] + list(PACKAGES))
        return 0
    if arguments == ["--untested"]:
        print("\n".join(untested()))
        return 0
    if arguments:
        show([folder.rstrip("/") for folder in arguments])
        return 0
    limits = tomllib.loads((ROOT / ".ci/size.toml").read_text())["limits"]
    found, exceeded = figures(), 0
    for name, value in found.items():
        over = value > limits[name]
        exceeded += over
        print(f"{name:28} {value:9g} of {limits[name]:g}{'  exceeded' if over else ''}")
    return 1 if exceeded else 0


# Files of stages that predict without a planner in their name.
PREDICTION = frozenset({"model_parts"})

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
