"""What indexing and library calls do to the rows of a value (see ``lineage``)."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from osler.rules.lineage_values import EMPTY, Statistic, Value, join
from osler.rules.script import call_name, root

if TYPE_CHECKING:
    from osler.rules.lineage import Walk

REDUCTIONS = frozenset(("mean", "std", "var", "min", "max", "amin", "amax", "median", "quantile", "percentile", "sum", "nanmean", "nanstd", "nanmedian", "norm", "ptp",
                        "std_mean", "var_mean", "mode", "nanmin", "nanmax", "value_counts", "cov", "svd", "pca_lowrank", "eigh", "eig", "agg", "aggregate"))
MOMENTS = frozenset(("corrcoef", "corr", "corrwith", "pearsonr", "spearmanr", "ttest_ind", "f_classif", "f_regression", "chi2", "mutual_info_classif", "mutual_info_regression",
                     "mannwhitneyu", "kendalltau", "lstsq", "f_oneway", "point_biserial", "pointbiserialr", "bincount", "index_add", "index_add_", "scatter_add",
                     "scatter_add_", "scatter_reduce", "at", "polyfit", "ks_2samp"))
NO_ROWS = frozenset(("len", "range", "int", "float", "print", "isinstance", "seed", "manual_seed", "default_rng", "Generator", "RandomState", "size", "numel", "item", "round", "str",
                     "zeros", "empty", "ones", "full", "zeros_like", "empty_like", "ones_like", "eye", "min_rows", "device", "set_num_threads", "open", "defaultdict", "Path"))
BORN = frozenset(("randn", "rand", "normal", "standard_normal", "uniform", "integers", "randint", "random", "read_csv", "read_parquet", "read_json", "read_table", "load", "loadtxt",
                  "genfromtxt", "load_digits", "load_iris", "load_breast_cancer", "load_wine", "load_diabetes", "make_classification", "make_regression", "make_moons",
                  "make_blobs", "make_circles", "fetch_california_housing", "gamma", "exponential", "lognormal", "poisson", "binomial", "beta", "multivariate_normal",
                  "standard_t", "laplace", "DataFrame", "choice", "linspace", "arange", "repeat", "rand_like", "randn_like"))
ORDERS = frozenset(("randperm", "permutation", "argsort", "shuffle"))
JOINS = frozenset(("cat", "concatenate", "vstack", "row_stack", "concat", "ConcatDataset", "append"))
CLASS_ROWS = frozenset(("groupby",))
FOLDS = ("KFold", "StratifiedKFold", "ShuffleSplit", "StratifiedShuffleSplit", "RepeatedKFold")
GROUPED = ("GroupKFold", "GroupShuffleSplit", "StratifiedGroupKFold", "LeaveOneGroupOut")


def learn(value: Value, trail: tuple[int, ...], labels: bool, kind: str = "statistic") -> Value:
    """What remains of a value when its rows are summed up."""
    new = frozenset(Statistic(table, trail, labels, kind) for table in value.whole) if not value.part else frozenset()
    return Value(learned=value.learned | new)


def axis_of(node: ast.Call, first: int) -> object:
    """The axis a reduction runs over: a number, ``None`` when it is not given, "?" for anything else."""
    given = next((k.value for k in node.keywords if k.arg in ("axis", "dim")), None)
    if given is None and len(node.args) > first:
        given = node.args[first]
    if given is None:
        return None
    try:
        return ast.literal_eval(given)
    except (ValueError, TypeError):
        return "?"


def full(node: ast.expr) -> bool:
    return (isinstance(node, ast.Slice) and node.lower is None and node.upper is None) or (isinstance(node, ast.Constant) and node.value in (None, Ellipsis))


def indexed(walk: Walk, node: ast.Subscript, env: dict[str, Value]) -> Value:
    """``x[index]``: columns, a filter, a part of the rows, or all of them in another order."""
    holder, index = node.value, node.slice
    accessor = isinstance(holder, ast.Attribute) and holder.attr in ("iloc", "loc")
    value = walk.value(holder.value if accessor and isinstance(holder, ast.Attribute) else holder, env)
    if value.made:
        value = join(walk.objects[value.made][1].values())
    if isinstance(index, ast.Constant) and isinstance(index.value, int) and value.items and -len(value.items) <= index.value < len(value.items):
        return value.items[index.value]
    if isinstance(index, ast.Constant) and isinstance(index.value, str):
        goal = index.value in walk.label_columns
        learned = frozenset(replace(x, labels=True) for x in value.learned) if goal and not value.rows else value.learned
        return replace(value, label=value.label or goal, learned=learned)
    first, rest = (index.elts[0], index.elts[1:]) if isinstance(index, ast.Tuple) and index.elts else (index, [])
    other = join([walk.value(e, env) for e in rest if not isinstance(e, ast.Slice)]) if rest else None
    if other is not None and other.learned:
        value = replace(value, learned=value.learned | frozenset(replace(s, kind="selection") for s in other.learned))
    if full(first):
        return replace(value, items=())
    if isinstance(first, ast.Slice):
        at = join([walk.value(e, env) for e in (first.lower, first.upper, first.step) if e is not None])
        if not value.rows:
            return replace(value, learned=value.learned | at.learned, order=False, places=value.places or value.order, items=())
        if (first.lower is None and first.upper is None) or trimmed(walk, first):
            return replace(value, items=())
        return piece(walk, node, value, "order")
    at = walk.value(first, env)
    if value.rows and not at.rows and counted(walk, first):
        return replace(value, items=())
    if not value.rows and at.rows:  # a table of codes looked up by row: enc[city]
        return replace(at, learned=at.learned | value.learned, label=value.label and not value.learned, items=(), mask=False)
    if not value.rows or at.names:
        return replace(value, label=value.label or bool(set(at.names) & walk.label_columns), learned=value.learned | at.learned, items=(), names=value.names if "groupby" in value.names else ())
    if at.order:
        return value
    if not at.rows and not at.mask and not at.places and value.whole & walk.frames and not accessor:
        return replace(value, learned=value.learned | frozenset(replace(x, kind="selection") for x in at.learned), items=())
    if at.label and not at.part:
        return replace(value, label=True, items=())
    if at.whole and not at.part and not at.mask:
        return replace(value, items=(), learned=value.learned | at.learned)
    return piece(walk, node, value, "group" if at.part else "")


def trimmed(walk: Walk, cut: ast.Slice) -> bool:
    """A window at a moving place (``x[i:i + w]``), or a few rows cut off at the ends: no division."""
    bounds = [b for b in (cut.lower, cut.upper) if b is not None]
    if any(isinstance(n, ast.Name) and n.id in walk.counters for b in bounds for n in ast.walk(b)):
        return True
    if cut.lower is not None and cut.upper is not None:
        low = {n.id for n in ast.walk(cut.lower) if isinstance(n, ast.Name)}
        if low and low & {n.id for n in ast.walk(cut.upper) if isinstance(n, ast.Name)} and isinstance(cut.upper, ast.BinOp):
            return True
    return all(_short(b) for b in bounds)


def _short(bound: ast.expr) -> bool:
    inner = bound.operand if isinstance(bound, ast.UnaryOp) else bound
    if isinstance(inner, ast.BinOp):
        return _short(inner.left) and _short(inner.right)
    if isinstance(inner, ast.Name):
        return bool(re.match(r"^(w|win\w*|window\w*|lag\w*|n_?lags|seq_?len\w*|l|lookback|look_back|horizon|h|k|order|history|hist|context|ctx\w*|steps?_ahead|burn\w*|warmup)$", inner.id, re.I))
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int) and abs(inner.value) <= 5


def counted(walk: Walk, index: ast.expr) -> bool:
    names = [n for n in ast.walk(index) if isinstance(n, ast.Name)]
    return not any(isinstance(n, ast.Call) for n in ast.walk(index)) and (any(n.id in walk.counters for n in names) or isinstance(index, ast.Constant))


def piece(walk: Walk, node: ast.AST, value: Value, how: str) -> Value:
    walk.cut(node, value, how, (value, *value.items))
    return replace(value, part=value.part | value.whole, whole=frozenset(), items=())


def components(walk: Walk, value: Value) -> tuple[Value, ...]:
    """What a data set is made of."""
    if value.made:
        return tuple(c for v in walk.objects[value.made][1].values() for c in ((v,) if not v.items else v.items))
    return value.items or (value,)


def called(walk: Walk, node: ast.Call, env: dict[str, Value]) -> Value:
    """A call: of the user's own function or class, or of a library."""
    name = call_name(node)
    holder = walk.value(node.func.value, env) if isinstance(node.func, ast.Attribute) else EMPTY
    given = [walk.value(a.value if isinstance(a, ast.Starred) else a, env) for a in node.args]
    named = {k.arg or "**": walk.value(k.value, env) for k in node.keywords}
    if isinstance(node.func, ast.Name) and name in walk.functions:
        return walk.enter(walk.functions[name], given, named, None, name, node.lineno)
    if name in walk.classes and (isinstance(node.func, ast.Name) or not holder.rows):
        return walk.build(name, given, named, node.lineno)
    if holder.made:
        found = walk.method(walk.objects[holder.made][0], name)
        if found is not None:
            return walk.enter(found, given, named, holder, f"{walk.objects[holder.made][0]}.{name}", node.lineno)
        return join([*walk.objects[holder.made][1].values(), *given]) if name not in NO_ROWS else EMPTY
    every = [holder, *given, *named.values()]
    everything = replace(join(every), items=(), made=0, names=())
    if name == "train_test_split" and given:
        how = "order" if any(k.arg == "shuffle" and isinstance(k.value, ast.Constant) and k.value.value is False for k in node.keywords) else "random"
        whole = join(given)
        walk.cut(node, whole, how, tuple(c for g in given for c in components(walk, g)))
        sides = [replace(g, part=g.part | g.whole, whole=frozenset()) for g in given]
        return Value(items=tuple(s for side in sides for s in (side, side)))
    if name in ("random_split", "Subset") and given:
        inside = components(walk, given[0])
        whole = join(inside)
        if name == "Subset" and len(given) > 1 and given[1].order:
            return given[0]
        walk.cut(node, whole, "random" if name == "random_split" else "", inside)
        side = replace(whole, part=whole.part | whole.whole, whole=frozenset(), items=())
        return side if name == "Subset" else Value(part=side.part, learned=side.learned)
    if name == "TensorDataset":
        return Value(whole=everything.whole, part=everything.part, items=tuple(given))
    if name in ("sample", "head", "tail", "skip", "take") and holder.whole and name in ("sample", "head", "tail"):
        everything_rows = name == "sample" and any(k.arg == "frac" and isinstance(k.value, ast.Constant) and k.value.value in (1, 1.0) for k in node.keywords)
        return holder if everything_rows else piece(walk, node, holder, "random" if name == "sample" else "order")
    if name == "drop" and holder.whole and given and not given[0].names and not any(k.arg in ("columns", "axis") for k in node.keywords):
        return piece(walk, node, holder, "random")
    if name in ("append", "extend", "add", "insert", "update") and isinstance(node.func, ast.Attribute) and root(node.func.value) not in ("np", "torch"):
        walk.bind_into(node.func.value, join(given), env)
        return EMPTY
    if name in ORDERS:
        if name == "shuffle":
            return EMPTY
        return Value(order=True, learned=everything.learned if name == "argsort" else frozenset(), names=())
    if name in ("fit", "fit_transform", "fit_resample", "partial_fit"):
        whole = join(given)
        labels = (len(given) > 1 and (given[1].label or given[1].rows)) or "y" in named
        left = learn(whole, walk.trail(node), labels, "fit")
        holder_name = root(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if holder_name is not None and holder_name in env:
            env[holder_name] = replace(join((env[holder_name], left)), items=())
        if name == "fit":
            return left
        out = replace(given[0], learned=given[0].learned | left.learned, items=()) if given else left
        return Value(items=(out, given[1]), whole=out.whole, learned=out.learned) if name == "fit_resample" and len(given) > 1 else out
    if name in ("transform", "apply", "map", "predict", "predict_proba", "replace", "fillna", "astype", "to_numpy", "clip", "clamp", "where", "nan_to_num"):
        grouped = "groupby" in holder.names
        if grouped and name in ("transform", "apply"):
            return replace(holder, learned=holder.learned | learn(holder, walk.trail(node), holder.label, "encoding").learned, names=(), label=False)
        return everything if not holder.rows or not given else replace(everything, label=holder.label)
    if name in ("rolling", "expanding", "ewm"):
        return replace(holder, names=("rolling",))
    if name in REDUCTIONS and "rolling" in holder.names:
        return replace(holder, names=())
    if name in CLASS_ROWS:
        return replace(holder, names=("groupby",))
    if name in MOMENTS:
        whole = join(v for v in every if v.rows) if any(v.rows for v in every) else EMPTY
        left = learn(whole, walk.trail(node), any(v.label for v in every), "encoding" if name in ("bincount", "index_add_", "scatter_add_", "index_add", "scatter_add", "at") else "statistic")
        if whole.rows and not whole.part:
            if (name.endswith("_") or name == "at") and (target := (node.args[0] if name == "at" and node.args else getattr(node.func, "value", None))) is not None:
                walk.bind_into(target, left, env)
            return left
    if name in REDUCTIONS:
        method = isinstance(node.func, ast.Attribute) and (holder.rows or bool(holder.learned))
        subject = holder if method else (given[0] if given else EMPTY)
        axis = None if name in ("agg", "aggregate", "value_counts") else axis_of(node, 0 if method else 1)
        if subject.rows and (axis in (None, 0, "?", (0,), (0, 1), (0, 2), (0, 2, 3), (0, 1, 2)) or name in ("quantile", "percentile", "norm", "median", "svd")) and axis not in (1, -1):
            return learn(subject, walk.trail(node), subject.label or "label" in subject.names, "encoding" if "groupby" in holder.names else "statistic")
        return everything
    if name in JOINS and node.args:
        return grown(walk, node, env, given, everything)
    if name == "enumerate":
        return Value(items=(EMPTY, given[0] if given else EMPTY))
    if name == "zip":
        return Value(whole=everything.whole, part=everything.part, items=tuple(given))
    if name == "split" and not holder.rows and any(v.rows for v in given):
        return Value(items=(EMPTY, EMPTY))
    if name in NO_ROWS and (isinstance(node.func, ast.Name) or name not in ("float", "int", "round", "str")):
        return Value(learned=everything.learned) if name in ("float", "round", "item") else EMPTY
    made = name in BORN or re.match(r"(load|fetch|read|make|generate|simulate|synth)(_|$)\w*", name)
    if not everything.rows and not everything.learned and made:
        born = walk.table(node)
        walk.frames |= born.whole if name in ("DataFrame", "read_csv", "read_parquet", "read_json", "read_table") else set()
        return born
    if name == "DataFrame":
        walk.frames |= everything.whole
    if name in ("unique", "set", "Counter", "sorted"):
        return replace(everything, label=False) if name == "unique" else learn(everything, walk.trail(node), False, "vocabulary") if name in ("set", "Counter") else everything
    return everything


def grown(walk: Walk, node: ast.Call, env: dict[str, Value], given: list[Value], everything: Value) -> Value:
    """Rows put below each other: when some are made from others, that is noted."""
    if axis_of(node, 1) not in (None, 0):
        return everything
    parts = node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else node.args if len(node.args) > 1 else []
    plain = {n for p in parts if isinstance(p, ast.Name) and (n := p.id)}
    values = [walk.value(p, env) for p in parts]
    first = next((v for p, v in zip(parts, values, strict=True) if isinstance(p, ast.Name) and v.whole and not v.part), None)
    own = [p for p in parts if not isinstance(p, ast.Name) and {n.id for n in ast.walk(p) if isinstance(n, ast.Name)} & plain]
    if first is None or all(v.label and not v.learned for v in values):
        return everything
    derived = [v for v in values if v is not first and not v.part and v.whole >= first.whole]
    if own or derived:
        return replace(everything, learned=everything.learned | learn(first, walk.trail(node), any(v.label for v in values), "copies").learned)
    return everything
