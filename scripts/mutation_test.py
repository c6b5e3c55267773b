"""Changes the product by a line at a time, and sees whether a test that concerns the line fails.

    .venv/bin/python scripts/mutation_test.py --kind known semantic random --slow --json mutants.json

scripts/mutants.toml has those of kind `known`, which survived an earlier review, and `semantic`, written from the code
without its tests. Those of kind `random` are drawn with a seed: a comparison, an operator, a number, a truth value, a
condition or a returned value of any product file that can be tested without a GPU, a display or a Triton compiler. A
mutant is tried in a copy of the working tree. The tests that concern a file are those of its name, and those that
import the file or what imports it: at most five files, the nearest first. With --slow, slow tests run after the others
have passed. A test that fails without the mutant, too, is left out.

Torch and the other packages are imported once, and each run of pytest is forked from there; --jobs N tries N mutants at
a time, each in a copy of its own.
"""

import argparse
import ast
import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("terra", "tokenizer", "decoder")
# What needs a GPU, a display or a Triton compiler to be tested.
EXCLUDED = ("terra/engine/graph/", "terra/engine/vllm/", "terra/recording/", "terra/benchmark/")
MOST_FILES = 5

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not"}
COMPARISONS |= {ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*"}
OPERATORS |= {ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<", ast.BitXor: "&", ast.MatMult: "+"}


@dataclass
class Mutant:
    """A change of a file, and what became of it.

    Attributes:
        kind: "known", "semantic" or "random".
        file: path in the repository; `old` is replaced by `new` at the character `at`.
        survives: why it needn't be caught, if that is known.
        verdict: "killed", "survived", "no end", "no tests" or "does not apply".
        by: the test that failed.
    """

    kind: str
    name: str
    file: str
    old: str
    new: str
    at: int = -1
    survives: str = ""
    verdict: str = ""
    by: str = ""
    seconds: float = 0.0

    def apply(self, text: str) -> str | None:
        """The file's text with the change; None if `old` is not there, or is there more than once."""
        at = self.at
        if at < 0:
            at = text.find(self.old) if text.count(self.old) == 1 else -1
        if at < 0 or not text.startswith(self.old, at):
            return None
        return text[:at] + self.new + text[at + len(self.old) :]


def listed_mutants(kinds: Sequence[str]) -> list[Mutant]:
    """The mutants of scripts/mutants.toml."""
    tables = tomllib.loads((ROOT / "scripts/mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(kind, **values) for kind in kinds for values in tables.get(kind, [])]


def drawn_mutants(count: int, seed: int) -> list[Mutant]:
    """Mutants drawn evenly from all that there are in the product's files."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [str(path.relative_to(ROOT)) for path in files]
    every = [mutant for name in names if not name.startswith(EXCLUDED) for mutant in mutants_of(name)]
    return random.Random(seed).sample(every, count)


def mutants_of(name: str) -> Iterator[Mutant]:
    """Every change of one place in a file: comparisons, operators, numbers, truth values, conditions, results."""
    text = (ROOT / name).read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        place = [getattr(node, each) for each in ("lineno", "col_offset", "end_lineno", "end_col_offset")]
        lines = text.splitlines(keepends=True)
        return tuple(  # columns are bytes of UTF-8
            starts[line - 1] + len(lines[line - 1].encode()[:column].decode())
            for line, column in (place[:2], place[2:])
        )  # pyright: ignore[reportReturnType]

    def replaced(node: ast.AST, new: str) -> Mutant:
        begin, end = span(node)
        line = text.count("\n", 0, begin) + 1
        old = text[begin:end]
        return Mutant("random", f"{name}:{line}: {_short(old)} -> {_short(new)}", name, old, new, begin)

    def between(left: ast.AST, right: ast.AST, new: str) -> Mutant:
        begin, end = span(left)[1], span(right)[0]
        old = text[begin:end]
        symbol = old.strip(" ()\n")
        return Mutant(
            "random",
            f"{name}:{text.count(chr(10), 0, begin) + 1}: {symbol} -> {new}",
            name,
            old,
            old.replace(symbol, new, 1),
            begin,
        )

    for node in _code(ast.parse(text)):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield between(left, right, COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if not isinstance(
                left, ast.Constant | ast.JoinedStr
            ) or (not isinstance(getattr(left, "value", ""), str)):
                yield between(left, right, OPERATORS[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right]):
                yield between(left, right, "or" if isinstance(operator, ast.And) else "and")
            case ast.Constant(value=bool() as value):
                yield replaced(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield replaced(node, f"({value!r} + 1)")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield replaced(test, f"(not ({ast.get_source_segment(text, test)}))")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield replaced(value, "None")


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node, without annotations and what is for type checkers alone."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from _code(child)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, and for `from a import b` both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


class Related:
    """Finds the test files that concern a product file."""

    def __init__(self) -> None:
        tests = [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "tests/support").glob("*.py")]
        self._tests = {path: imports_of(path) for path in sorted(tests)}
        files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
        self._product = {self._module(path): imports_of(path) for path in files}

    @staticmethod
    def _module(path: Path) -> str:
        return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def tests(self, mutant: Mutant, text: str) -> list[Path]:
        """The test files, nearest first: of the file's name, of its room, naming what is changed, importing the file
        or its users, naming the file.
        """
        name, changed = mutant.file, enclosing_name(mutant, text)
        module = self._module(ROOT / name)
        near, wider = {module}, {module}
        for _ in range(2):
            wider |= {other for other, imported in self._product.items() if imported & wider}
        parent, last = module.rpartition(".")[0], module.rpartition(".")[2]
        room = parent.rpartition(".")[2]

        def distance(path: Path) -> int | None:
            imported = self._tests[path] | {
                each
                for helper in self._tests[path]
                for each in self._tests.get(ROOT / f"tests/support/{helper}.py", ())
            }
            if path.stem in (f"test_{last}", f"test_{room}"):
                return 0
            if self._tests[path] & near:
                return 1
            if {parent} & imported or imported & near:
                return 2
            return 3 if imported & wider else None

        found = [(distance(path), path) for path in self._tests if path.name.startswith("test_")]

        def rank(far: int, path: Path) -> tuple[bool, bool, int, int, int]:
            text = path.read_text(encoding="utf-8")
            named, of_file = (len(re.findall(rf"\b{word}\b", text)) for word in (changed, last))
            return far > 0, not path.stem.startswith(f"test_{room}"), -named, far, -of_file

        ranked = sorted((*rank(far, path), path) for far, path in found if far is not None)
        return [path for *_, path in ranked[:MOST_FILES]]


def enclosing_name(mutant: Mutant, text: str) -> str:
    """The name of the innermost public function or class around a mutant's first line; "no_name" if none is."""
    at = mutant.at if mutant.at >= 0 else text.find(mutant.old)
    line, name = text.count("\n", 0, at + len(mutant.old) - len(mutant.old.lstrip())) + 1, "no_name"
    for node in ast.walk(ast.parse(text)):  # outer nodes come first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = node.name if node.lineno <= line <= (node.end_lineno or 0) else name
    return name


def copy_tree(folder: Path) -> None:
    """Copy the files that git knows, or would."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, names):
        source, target = ROOT / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def run_tests(tree: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run pytest in a tree, in a process forked from this one; its exit code (None: no end in time), and its output."""
    log = tree / ".mutation.log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(tree)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path.insert(0, str(tree))
            os.environ |= {
                "PYTHONPATH": str(tree),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".hypothesis"),
            }
            sys.dont_write_bytecode = True
            import pytest

            options = ["-q", "-x", "-rfE", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = int(pytest.main([*options, *arguments]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with_output = log.read_text(errors="replace")
            return os.waitstatus_to_exitcode(status), with_output
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, ""


@functools.cache
def own_tree() -> Path:
    """The copy of the working tree in which this process tries its mutants; made once, in `tempfile.tempdir`."""
    tree = Path(tempfile.mkdtemp())
    copy_tree(tree)
    return tree


def try_mutant(mutant: Mutant, related: Related, seconds: float, slow: bool) -> Mutant:
    """Set a mutant's verdict, and return it."""
    started, tree = time.monotonic(), own_tree()
    target = tree / mutant.file
    text = target.read_text(encoding="utf-8")
    changed = mutant.apply(text)
    tests = [str(path.relative_to(ROOT)) for path in related.tests(mutant, text)]
    if changed is None or not tests:
        mutant.verdict = "does not apply" if changed is None else "no tests"
        return mutant
    mutant.verdict = "survived"
    for marks in ("not slow and not hostile", "slow and not hostile")[: 1 + slow]:
        left: list[str] = []
        while mutant.verdict == "survived":
            target.write_text(changed, encoding="utf-8")
            try:
                code, output = run_tests(tree, [*tests, "-m", marks, *left], seconds)
            finally:
                target.write_text(text, encoding="utf-8")
            if code in (0, 5):
                break
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            if code is None:
                mutant.verdict = "no end"
            elif failed is None:
                raise RuntimeError(f"pytest ended with {code} and without a failed test:\n{output[-2000:]}")
            elif run_tests(tree, [failed[1]], seconds)[0] == 0:
                mutant.verdict, mutant.by = "killed", failed[1]
            else:
                left += ["--deselect", failed[1]]
    mutant.seconds = round(time.monotonic() - started, 1)
    return mutant


def main() -> None:
    """Try the mutants, print a table, and exit with 1 if more than 5 % of those without an explanation survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", default=["known", "semantic", "random"])
    parser.add_argument("--count", type=int, default=30, help="random mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--seconds", type=float, default=300, help="a run of pytest, at most")
    parser.add_argument("--slow", action="store_true", help="run slow tests, too, when the others pass")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mutants = listed_mutants([kind for kind in options.kind if kind != "random"])
    if "random" in options.kind:
        mutants += drawn_mutants(options.count, options.seed)
    mutants = [mutant for mutant in mutants if re.search(options.only, mutant.name)]
    import hydra  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    attempt = functools.partial(try_mutant, related=Related(), seconds=options.seconds, slow=options.slow)
    tried: list[Mutant] = []
    folder = tempfile.TemporaryDirectory(prefix="terra-mutants-")
    fork = multiprocessing.get_context("fork")
    # No `multiprocessing.Pool`: its processes are daemons, in which a test that starts processes fails.
    with folder as tempfile.tempdir, ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
        for done in as_completed([pool.submit(attempt, mutant) for mutant in mutants]):
            mutant = done.result()
            tried.append(mutant)
            seconds = f"{mutant.seconds:5.0f} s"
            print(f"{mutant.verdict:9} {mutant.kind:9} {seconds}  {mutant.name}  {mutant.by}", flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps([asdict(each) for each in tried], indent=1))
    for kind in dict.fromkeys(mutant.kind for mutant in tried):
        own = [mutant for mutant in tried if mutant.kind == kind]
        counts = {verdict: sum(each.verdict == verdict for each in own) for verdict in {each.verdict for each in own}}
        told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        print(f"{kind}: {len(own)} mutants, {told}")
    unexplained = [mutant for mutant in tried if not mutant.survives]
    caught = sum(mutant.verdict in ("killed", "no end") for mutant in unexplained)
    sys.exit(caught < 0.95 * len(unexplained))


if __name__ == "__main__":
    main()
