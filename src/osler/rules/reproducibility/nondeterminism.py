from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.script import FUNCTIONS, call_name, calls, targets, tree, words

STRINGS = re.compile(r"(^|_)(words?|tokens?|chars?|texts?|letters?|sentences?|corpus|names?|tags?|vocab\w*|lines?|docs?|strings?|users?|cities|city|countries|genres?|kinds?|labels?_str|keys?)(_|$|\d)", re.I)
SPOKEN = re.compile(r"(^|[_.])(words?|chars?|letters?|vocabulary)(_|$)", re.I)
"""Names of sets that hold strings where text is handled, whatever their elements are called."""
MAKES_STRINGS = frozenset(("split", "read", "read_text", "lower", "upper", "strip", "join", "replace", "readlines", "splitlines", "format", "decode", "str", "tokenize", "findall"))
ORDERS = frozenset(("list", "tuple", "enumerate", "iter", "zip", "dict", "join", "array", "asarray", "next"))
FREE = frozenset(("sorted", "len", "set", "frozenset", "min", "max", "sum", "any", "all", "Counter", "isdisjoint", "issubset", "union", "intersection", "difference", "print", "bool"))
SEEDERS = frozenset(("manual_seed", "seed", "seed_everything", "set_seed", "fix_seed", "setup_seed", "manual_seed_all", "fork_rng", "enable_full_determinism", "seed_all", "set_random_seed"))
NUMPY = frozenset(("rand", "randn", "randint", "random", "choice", "permutation", "shuffle", "normal", "uniform", "binomial", "multivariate_normal", "random_sample", "standard_normal", "exponential",
                   "poisson", "beta", "gamma", "integers"))
PYTHON = frozenset(("random", "randint", "choice", "choices", "sample", "shuffle", "uniform", "gauss", "randrange", "normalvariate"))
SKLEARN = frozenset(("train_test_split", "make_blobs", "make_moons", "make_classification", "make_regression", "make_circles", "make_swiss_roll", "make_friedman1", "shuffle", "resample"))
INTENT = re.compile(r"reproduc|determinis|seed", re.I)
CLOCK = frozenset(("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "now", "getpid", "urandom", "SystemRandom", "token_bytes", "randbits", "uuid4", "utcnow"))


@rule("nondeterminism", "reproducibility")
def check(window: Window) -> Iterator[Finding]:
    """Two runs of the same command differ: nothing is seeded, or the result depends on the order of a set.

    **What it is.** Weights, shuffling, splits or dropout draw from a generator that nobody seeded; or one library is seeded and another
    one draws; or a vocabulary, a feature order or a bucket comes out of `set` or `hash` over strings, which Python salts anew in every process;
    or files come in the order of the directory.

    **How it is seen.** In the text of the script: which generators are seeded and which draw; sets of strings that are
    enumerated or listed unsorted; `hash()` of strings; `os.listdir` and `glob` unsorted; seeds taken from the clock. Calls of
    torch.manual_seed were recorded.

    **Why it matters.** A number that cannot be had again cannot be compared; a checkpoint with another vocabulary order is garbage.

    **What to do.** Seed torch, numpy and random once at the start; pass `generator=` to random_split and DataLoader and `random_state=` to
    scikit-learn; `sorted(set(...))`; a hash of hashlib or zlib.crc32; `sorted(os.listdir(...))`.

    **When this is wrong.** A run whose seeds are varied on purpose. Missing seeds are a note, or a waste where an unseeded split decides what is measured; harm is said only where the order of strings
    makes a seeded program differ from itself.

    **Source.** Handbook B §14 (⚠ PYTHONHASHSEED must be set before Python starts; ⚠ disabling cuDNN is unnecessary); PyTorch notes on reproducibility.
    """
    seen: set[str] = set()
    files = [f for f in window.sources if tree(window, f) is not None]
    seeded = window.facts("seed") != [] or any(call_name(c) in SEEDERS or any(k.arg in ("random_state", "seed") for k in c.keywords) for f in files for c in calls(tree(window, f)))
    for file in files:
        module = tree(window, file)
        if module is None:
            continue
        for line, what, fix in (*string_order(window, file, module), *string_hash(window, file, module)):
            if f"{file}:{line}" not in seen and len(seen) < 3:
                seen.add(f"{file}:{line}")
                yield Finding("nondeterminism", "certain", "harmful" if seeded else "note", what, fix, Where.at(Location(file, line)),
                              evidence=(Evidence(f"`{window.line(file, line).strip()}`; the order of strings in a set, and hash() of a string, change with every process", "source", None, None, 1),),
                              treatment="seed")
    if seen or not window.n_steps:
        return
    for line, severity, what, fix, file in notes(window, files):
        yield Finding("nondeterminism", "certain", severity, what, fix, Where.at(Location(file, line)),
                      evidence=(Evidence(f"`{window.line(file, line).strip()}`", "source", None, None, 1),), treatment="seed")
        return


def stringy(node: ast.AST | None, module: ast.Module, depth: int = 7) -> bool:
    """Whether an expression is a string or a collection of strings, as far as the text tells."""
    if node is None or depth == 0:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return bool(node.elts) and stringy(node.elts[0], module, depth)
    if isinstance(node, ast.Call):
        name = call_name(node)
        if name in MAKES_STRINGS:
            return True
        if name in ("int", "float", "tolist", "range", "len", "round", "sum", "arange", "unique", "tensor", "array", "id", "zip", "ord"):
            return False
        if name in ("list", "set", "sorted", "tuple", "chain", "from_iterable", "frozenset", "choice", "choices", "Counter", "sum") and node.args:
            return stringy(node.args[0].value if isinstance(node.args[0], ast.Starred) else node.args[0], module, depth - 1)
        function = next((n for n in ast.walk(module) if isinstance(n, FUNCTIONS) and n.name == name), None)
        returns = [r.value for r in ast.walk(function) if isinstance(r, ast.Return)] if function is not None else []
        return any(stringy(r, module, depth - 1) for r in returns)
    if isinstance(node, ast.BinOp):
        return stringy(node.left, module, depth - 1) or stringy(node.right, module, depth - 1)
    if isinstance(node, ast.IfExp):
        return stringy(node.body, module, depth - 1)
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        inner = node.elt
        if isinstance(inner, ast.Name):
            name = inner.id
            source = next((g.iter for g in node.generators if name in {n.id for n in ast.walk(g.target) if isinstance(n, ast.Name)}), None)
            return stringy(source, module, depth - 1) or bool(STRINGS.search(inner.id) and source is not None and not numeric(source, module))
        return stringy(inner, module, depth - 1)
    if isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            pairs = [v for d in ast.walk(module) if isinstance(d, ast.Dict) for k, v in zip(d.keys, d.values, strict=True) if isinstance(k, ast.Constant) and k.value == node.slice.value]
            return any(stringy(v, module, depth - 1) for v in pairs)
        return stringy(node.value, module, depth - 1)
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        bindings = [s for s in ast.walk(module) if isinstance(s, ast.Assign | ast.AnnAssign | ast.For) and any(t.split(".")[-1] == name for t in targets(s))]
        for s in bindings:
            value = s.iter if isinstance(s, ast.For) else s.value
            if isinstance(s, ast.For) and isinstance(s.target, ast.Tuple) and isinstance(value, ast.Call) and call_name(value) == "enumerate" and value.args:
                value = value.args[0]
            if stringy(value, module, depth - 1):
                return True
        given = [a for f in ast.walk(module) if isinstance(f, FUNCTIONS) and name in [a.arg for a in f.args.args] for c in calls(module, *called_as(module, f))
                 for at in [[a.arg for a in f.args.args].index(name) - (f.args.args[0].arg == "self")] if 0 <= at < len(c.args) for a in [c.args[at]]]
        if not bindings and given:
            return any(stringy(a, module, depth - 1) for a in given)
        return not bindings and bool(STRINGS.search(name))
    return False


def called_as(module: ast.Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names a function is called by: the class for its constructor, the variables that hold an instance for ``__call__``."""
    if function.name not in ("__init__", "__call__", "forward"):
        return {function.name}
    owner = next((n for n in ast.walk(module) if isinstance(n, ast.ClassDef) and function in n.body), None)
    if owner is None or function.name == "__init__":
        return {owner.name} if owner is not None else {function.name}
    return {t.split(".")[-1] for s in ast.walk(module) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and call_name(s.value) == owner.name for t in targets(s)} or {function.name}


def handles_text(module: ast.Module) -> bool:
    """Strings are split, joined or listed somewhere in the file."""
    return next(calls(module, *MAKES_STRINGS - {"str", "format", "replace"}), None) is not None or any(
        isinstance(n, ast.List | ast.Tuple) and len(n.elts) >= 3 and all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in n.elts) for n in ast.walk(module))


def numeric(node: ast.AST, module: ast.Module) -> bool:
    return any(call_name(c) in ("range", "tolist", "arange", "tensor", "len") for c in calls(node))


def set_names(module: ast.Module) -> set[str]:
    """Names bound to a set of strings and to nothing else that has an order."""
    found: set[str] = set()
    ordered: set[str] = set()
    for s in ast.walk(module):
        if isinstance(s, ast.Assign | ast.AnnAssign) and s.value is not None:
            for t in targets(s):
                spoken = isinstance(s.value, ast.SetComp) and bool(SPOKEN.search(t)) and handles_text(module)
                (found if spoken or string_set(s.value, module) else ordered).add(t)
    grown = {ast.unparse(c.func.value) for c in calls(module, "update", "add") if isinstance(c.func, ast.Attribute) and c.args and stringy(c.args[0], module)}
    empty = {t for s in ast.walk(module) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and call_name(s.value) == "set" and not s.value.args for t in targets(s)}
    return (found - ordered) | (empty & grown)


def string_set(node: ast.AST, module: ast.Module) -> bool:
    if isinstance(node, ast.Call) and call_name(node) in ("set", "frozenset") and isinstance(node.func, ast.Name) and node.args:
        return stringy(node.args[0], module)
    if isinstance(node, ast.SetComp):
        return stringy(node, module)
    if isinstance(node, ast.Set):
        return stringy(node, module)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return string_set(node.left, module) or string_set(node.right, module)
    if isinstance(node, ast.Call) and call_name(node) in ("union", "intersection", "difference") and isinstance(node.func, ast.Attribute):
        return string_set(node.func.value, module)
    return False


def string_order(window: Window, file: str, module: ast.Module) -> Iterator[tuple[int, str, str]]:
    """A set of strings is put into an order without being sorted."""
    names = set_names(module)

    def is_set(n: ast.AST) -> bool:
        return string_set(n, module) or (isinstance(n, ast.Name | ast.Attribute) and ast.unparse(n) in names)

    free = {id(x) for c in calls(module) if call_name(c) in FREE for a in c.args for x in orderless(a)}
    fix = "Sort it: sorted(set(...))."
    for n in ast.walk(module):
        if id(n) in free:
            continue
        if isinstance(n, ast.Call) and call_name(n) in ORDERS and n.args and is_set(n.args[0]):
            holder = parent_sorted(module, n)
            if not holder:
                yield n.lineno, f"{call_name(n)}() takes the order of a set of strings, which changes with every process", fix
        elif isinstance(n, ast.ListComp | ast.DictComp | ast.GeneratorExp) and n.generators and is_set(n.generators[0].iter) and not parent_sorted(module, n):
            yield n.lineno, "A sequence takes the order of a set of strings, which changes with every process", fix
        elif isinstance(n, ast.For) and is_set(n.iter) and builds(n):
            yield n.lineno, "A loop over a set of strings numbers or appends in an order that changes with every process", fix


def orderless(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an argument whose order does not matter to the call; of a slice the order does."""
    if not isinstance(node, ast.Subscript):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from orderless(child)


def parent_sorted(module: ast.Module, node: ast.AST) -> bool:
    """The list is sorted later: `chars = list(set(t)); chars.sort()`."""
    for s in ast.walk(module):
        if isinstance(s, ast.Assign) and any(x is node for x in ast.walk(s.value)):
            names = targets(s)
            return any(call_name(c) == "sort" and isinstance(c.func, ast.Attribute) and ast.unparse(c.func.value) in names for c in calls(module)) or any(
                call_name(c) == "sorted" and c.args and ast.unparse(c.args[0]) in names for c in calls(module))
    return False


def builds(loop: ast.For) -> bool:
    """Whether the body appends, or gives out numbers that grow."""
    return any(call_name(c) in ("append", "extend", "add_token", "setdefault") for c in calls(loop)) or any(
        isinstance(s, ast.Assign) and any(isinstance(t, ast.Subscript) for t in s.targets) and any(call_name(c) == "len" for c in calls(s.value)) for s in ast.walk(loop)) or any(
        isinstance(s, ast.AugAssign) and isinstance(s.value, ast.Constant) for s in ast.walk(loop))


def string_hash(window: Window, file: str, module: ast.Module) -> Iterator[tuple[int, str, str]]:
    inside = {id(x) for f in ast.walk(module) if isinstance(f, FUNCTIONS) and f.name == "__hash__" for x in ast.walk(f)}
    for c in calls(module, "hash"):
        if isinstance(c.func, ast.Name) and c.args and id(c) not in inside:
            argument = c.args[0]
            name = argument.id if isinstance(argument, ast.Name) else ""
            parameter = bool(name) and any(name in [a.arg for a in f.args.args] for f in ast.walk(module) if isinstance(f, FUNCTIONS) and any(x is c for x in ast.walk(f)))
            if stringy(argument, module) or (parameter and re.search(r"w|tok|s|text|name|key|term|gram|x", name) and not re.search(r"^(i|idx|n|index)$", name)) \
                    or (isinstance(argument, ast.Tuple) and any(stringy(e, module) for e in argument.elts)):
                yield c.lineno, "hash() of a string changes with every process", "Use a stable hash: zlib.crc32(text.encode()) or hashlib."


def notes(window: Window, files: list[str]) -> Iterator[tuple[int, str, str, str, str]]:
    """(line, severity, title, fix, file) of the missing seeds, the most telling first."""
    trees = [(f, module) for f in files if (module := tree(window, f)) is not None]
    every = [(f, c, ast.unparse(c.func)) for f, module in trees for c in calls(module)]
    own = {n.name for _, m in trees for n in ast.walk(m) if isinstance(n, FUNCTIONS)}
    torch_seeded = bool(window.facts("seed")) or any(w in ("torch.manual_seed", "torch.random.manual_seed", "torch.seed", "pl.seed_everything", "torch.set_rng_state") or (call_name(c) in ("seed_everything", "set_seed", "enable_full_determinism") and call_name(c) not in own)
                                                   for _, c, w in every)
    numpy_seeded = any(w in ("np.random.seed", "numpy.random.seed", "np.random.set_state") for _, c, w in every)
    python_seeded = any(w == "random.seed" for _, c, w in every)
    if any(call_name(c) in ("set_seed", "seed_everything", "enable_full_determinism", "isolate_rng") and call_name(c) not in own for _, c, _ in every):
        torch_seeded = numpy_seeded = python_seeded = True
    for f, c, _ in every:
        if call_name(c) in ("manual_seed", "seed", "seed_everything", "default_rng", "RandomState") and c.args and CLOCK & words(c.args[0]):
            yield c.lineno, "note" if logged(window, f) else "harmful", "The seed comes from the clock or the system: no two runs are alike", "Use a fixed seed, and print it.", f
            return
    intended = torch_seeded or numpy_seeded or python_seeded
    for f, c, w in every:
        if not numpy_seeded and re.fullmatch(r"(np|numpy)\.random\.\w+", w) and call_name(c) in NUMPY:
            yield c.lineno, "note", f"{w} draws from NumPy's global generator, which nobody seeded", "np.random.seed(0) at the start, or a generator np.random.default_rng(0).", f
            return
        if w.endswith("default_rng") and not c.args and not c.keywords:
            yield c.lineno, "note", "default_rng() without a seed draws other numbers in every run", "Give it a seed.", f
            return
        if not numpy_seeded and call_name(c) in SKLEARN and isinstance(c.func, ast.Name) and any(n.module and n.module.startswith("sklearn") and call_name(c) in [a.name for a in n.names]
                                                                                                for _, m in trees for n in ast.walk(m) if isinstance(n, ast.ImportFrom)) \
                and not any(k.arg in ("random_state", "shuffle") for k in c.keywords):
            yield c.lineno, "note", f"{call_name(c)} without random_state splits or draws differently in every run", "Pass random_state=0.", f
            return
        if not numpy_seeded and call_name(c) in ("KFold", "StratifiedKFold", "ShuffleSplit", "StratifiedShuffleSplit", "GroupShuffleSplit") and not any(k.arg == "random_state" for k in c.keywords) \
                and ("Shuffle" in call_name(c) or any(k.arg == "shuffle" for k in c.keywords)):
            yield c.lineno, "note", f"{call_name(c)} without random_state draws differently in every run", "Pass random_state=0.", f
            return
        if not python_seeded and w in {f"random.{g}" for g in PYTHON}:
            yield c.lineno, "note", f"{w} draws from Python's generator, which nobody seeded", "random.seed(0) at the start.", f
            return
    if not torch_seeded:
        line, file = first_draw(window, trees)
        if line:
            yield line, "wasteful" if not intended and "split" in window.line(file, line) else "note", "Weights, shuffling and dropout draw from torch's generator, which nobody seeded" + (" (others are)" if intended else ""), "torch.manual_seed(0) before the first model or split is made.", file
            return
    for f, module in trees:
        for c in calls(module, "listdir", "glob", "iglob", "iterdir", "scandir", "rglob"):
            wrapped = any(call_name(s) in ("sorted", "set", "len", "max", "min", "natsorted") and any(x is c for a in s.args for x in ast.walk(a)) for s in calls(module))
            if not wrapped and not parent_sorted(module, c):
                yield c.lineno, "note", f"{call_name(c)} gives files in an order that depends on the file system", f"sorted({ast.unparse(c)})", f
                return


def logged(window: Window, file: str) -> bool:
    module = tree(window, file)
    return any(re.search(r"seed", ast.unparse(c), re.I) for c in calls(module, "print", "info", "save", "dump", "log"))


def first_draw(window: Window, trees: list[tuple[str, ast.Module]]) -> tuple[int, str]:
    """The first call at module level (or of a main function) that draws from torch's generator: a split, a shuffling loader, a layer, a tensor.

    The script's own file, whose loop trains, comes first.
    """
    main = next((f.at.file for f in window.facts("optimizer") if f.at is not None), trees[0][0] if trees else "")
    for file, module in sorted(trees, key=lambda t: t[0] != main):
        draws = []
        for c in calls(module):
            name = call_name(c)
            shuffles = name.endswith("DataLoader") and any(k.arg == "shuffle" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in c.keywords)
            if name in ("random_split", "randn", "rand", "randperm", "randint") or shuffles or name in ("Linear", "Conv2d", "Conv1d", "Embedding", "LSTM", "GRU"):
                draws.append(c.lineno)
        if draws:
            inner = {x.lineno for f in ast.walk(module) if isinstance(f, ast.ClassDef) for x in calls(f)}
            outside = [line for line in draws if line not in inner]
            return min(outside or draws), file
    return 0, ""
