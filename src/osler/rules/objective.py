"""What a script minimises: the expression before ``backward()``, taken apart into terms with the sign of their influence.

The text is expanded through assignments, the user's own functions and loss classes, lists that are appended to and
comprehensions. Only functions that grow with their argument are looked through, so a sign says whether the objective rises
(+1) or falls (-1) with the term. Not here: what the terms mean (``terms.py``). Standard library only; nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules import script
from osler.rules.objective_names import LIBRARIES, Names, Place
from osler.rules.scopes import own_nodes, scoped

LINEAR = frozenset(("detach", "item", "mean", "sum", "nanmean", "nansum", "squeeze", "unsqueeze", "view", "reshape", "flatten", "float", "to", "clone", "contiguous", "scale", "double", "cat", "stack",
                    "concat", "expand", "expand_as", "gather", "masked_select", "select", "index_select", "transpose", "permute", "tensor", "cpu", "cuda", "diag", "diagonal", "cumsum", "t",
                    "fsum", "take_along_dim", "average", "as_tensor", "nan_to_num", "values"))
GROWING = frozenset(("relu", "softplus", "exp", "log", "log1p", "expm1", "sqrt", "sigmoid", "tanh", "logsigmoid", "clamp", "clamp_min", "clip", "max", "min", "amax", "amin",
                     "maximum", "minimum", "logsumexp", "median", "quantile", "topk", "clamp_max", "where", "leaky_relu", "hinge"))
SPEAKING = re.compile(r"entropy|log_?prob|logp|(^|_)kl|loss|likelihood", re.I)
"""Names that say what an opaque call returned."""
NO_GRADIENT = frozenset(("detach", "item", "numpy", "tolist"))
SCALARS = re.compile(r"^(T|alpha|beta|gamma|lam|lamb|lambda_?|lmbda|lambd|coef|coeff|weight|scale|temp|temperature|tau|eps|epsilon|anneal|warm|kl_w|w|c|k|n|eta|rho|mu_w)$"
                     r"|coef|lambda|weight$|_w$|^w_|beta|alpha|scale$|ramp|anneal|_lam$|^lam_|^lam\d?$|_c\d?$", re.I)


@dataclass(frozen=True)
class Term:
    """One part of an objective.

    Attributes:
        node, place: the expression that was not taken apart further, and where it stands.
        sign: +1 if the objective rises with it.
        factor: product of the constants it is multiplied with (absolute value).
        through: names of the functions between it and the objective, innermost last.
        divisors: expressions it is divided by that are no constants.
        factors: for a product, its parts.
        flipped: line of the innermost minus on the way.
        guessed: a coefficient of unknown value was taken for 1.
        uses: for each name of the trail, the sign it is used with and the line.
        reduced: where the innermost sum or mean stands.
        scaled: line of the outermost factor or divisor.
        trail: names of the variables and functions that were expanded on the way, innermost last.
    """

    node: ast.expr
    place: Place
    sign: int = 1
    factor: float = 1.0
    through: tuple[str, ...] = ()
    divisors: tuple[ast.expr, ...] = ()
    factors: tuple[ast.expr, ...] = ()
    flipped: int | None = None
    trail: tuple[str, ...] = ()
    scaled: int | None = None
    reduced: Location | None = None
    uses: tuple[tuple[str, int, Location], ...] = ()
    guessed: bool = False

    @property
    def at(self) -> Location:
        return Location(self.place.file, self.node.lineno)


@dataclass(frozen=True)
class Objective:
    """``root`` is the expression whose gradient is taken; ``at`` the line of ``backward`` (or of the return in a framework's hook)."""

    at: Location
    root: ast.expr
    place: Place
    terms: tuple[Term, ...]


class Expander(Names):
    """Takes one window's expressions apart."""


    # -- expressions ---------------------------------------------------------------------------------------------

    def walk(self, node: ast.expr, place: Place, term: Term | None = None, depth: int = 12) -> Iterator[Term]:
        """Terms of an expression, each with the sign of its influence."""
        here = replace(term, node=node, place=place) if term is not None else Term(node, place)
        self.budget -= 1
        if depth <= 0 or self.budget <= 0:
            yield here
            return
        if isinstance(node, ast.Constant):
            return
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield from self.walk(node.operand, place, replace(here, sign=-here.sign, flipped=node.lineno), depth)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            yield from self.walk(node.left, place, here, depth)
            minus = isinstance(node.op, ast.Sub)
            yield from self.walk(node.right, place, replace(here, sign=-here.sign, flipped=node.right.lineno) if minus else here, depth)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            yield from self.product(node, place, here, depth)
        elif isinstance(node, ast.IfExp):
            yield from self.walk(node.body, place, here, depth - 1)
            yield from self.walk(node.orelse, place, here, depth - 1)
        elif isinstance(node, ast.List | ast.Tuple):
            for item in node.elts:
                yield from self.walk(item, place, here, depth - 1)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            yield from self.walk(node.elt, replace(place, bound={**place.bound, **comprehended(node, place)}), here, depth - 1)
        elif isinstance(node, ast.Subscript):
            yield from self.subscript(node, place, here, depth)
        elif isinstance(node, ast.Call):
            yield from self.call(node, place, here, depth)
        elif (name := script.dotted(node)) is not None and name not in ("self",):
            parts = self.expand(name, place) if self.stop is None or not self.stop.search(name.rsplit(".", 1)[-1]) else None
            if not parts:
                yield here
                return
            short = name.rsplit(".", 1)[-1]
            for inner, where, sign in parts:
                yield from self.walk(inner, where, replace(here, sign=here.sign * sign, flipped=inner.lineno if sign < 0 else here.flipped,
                                                             trail=(*here.trail, short), uses=(*here.uses, (short, here.sign * sign, Location(place.file, node.lineno)))), depth - 1)
        else:
            yield here

    def scalar(self, node: ast.expr, place: Place) -> float | None:
        """Value of a factor that is no tensor; 1.0 for a name that says it is a positive coefficient."""
        value = self.constant(node, place)
        if value is not None:
            return value
        name = script.dotted(node)
        if name is not None and name in place.bound:
            return self.scalar(*place.bound[name])
        if name is not None and SCALARS.search(name.rsplit(".", 1)[-1]):
            self.guessed = True
            return 1.0
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.Pow):
            left, right = self.scalar(node.left, place), self.scalar(node.right, place)
            if left is not None and right is not None:
                return left * right if isinstance(node.op, ast.Mult) else left / right if isinstance(node.op, ast.Div) and right else 1.0
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner_value = self.scalar(node.operand, place)
            return -inner_value if inner_value is not None else None
        if isinstance(node, ast.Call):
            name, method = script.call_name(node), isinstance(node.func, ast.Attribute)
            if name in ("len", "float", "int", "numel", "size") or (not method and (name in ("min", "max") or SCALARS.search(name) is not None)):
                self.guessed = True
                return 1.0
        if isinstance(node, ast.Subscript) and ("shape" in script.words(node.value) or re.search(r"cfg|config|args|hp|hparams|conf", ast.unparse(node.value))):
            self.guessed = True
            return 1.0
        if isinstance(node, ast.Attribute) and re.search(r"cfg|config|args|hparams", ast.unparse(node.value)):
            self.guessed = True
            return 1.0
        return None

    def product(self, node: ast.BinOp, place: Place, here: Term, depth: int) -> Iterator[Term]:
        factors, divisors, sign, constant, flipped, touched = [], [*here.divisors], here.sign, here.factor, here.flipped, False
        stack: list[tuple[ast.expr, bool]] = [(node, False)]
        self.guessed = here.guessed
        while stack:
            part, below = stack.pop()
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult | ast.Div) and not below:
                stack += [(part.right, isinstance(part.op, ast.Div)), (part.left, False)]
                continue
            if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
                sign, flipped = -sign, part.lineno
                stack.append((part.operand, below))
                continue
            value = self.scalar(part, place)
            touched = touched or value is not None or below
            if value is not None:
                sign = -sign if value < 0 else sign
                flipped = part.lineno if value < 0 else flipped
                size = abs(value) if value else 1.0
                constant = constant / size if below else constant * size
                if below:
                    divisors.append(part)
            elif below:
                divisors.append(part)
            else:
                factors.append(part)
        scaled = here.scaled if here.scaled is not None or not touched else node.lineno
        made = replace(here, sign=sign, factor=constant, divisors=tuple(divisors), flipped=flipped, scaled=scaled, guessed=self.guessed)
        if len(factors) == 1:
            yield from self.walk(factors[0], place, made, depth)
        elif factors:
            yield replace(made, node=node, factors=tuple(factors))

    def subscript(self, node: ast.Subscript, place: Place, here: Term, depth: int) -> Iterator[Term]:
        text = ast.unparse(node)
        if isinstance(node.slice, ast.Constant):
            index = node.slice.value
            for statement in sorted((n for n in own_nodes(place.scope) if isinstance(n, ast.Assign) and n.lineno < place.before), key=lambda n: -n.lineno):
                if any(ast.unparse(t) == text for t in statement.targets):
                    yield from self.walk(statement.value, replace(place, before=statement.lineno), here, depth - 1)
                    return
            inner: ast.expr = node.value
            if isinstance(inner, ast.Name):
                parts = self.expand(inner.id, place)
                inner, place = (parts[0][0], parts[0][1]) if parts and len(parts) == 1 else (inner, place)
            if isinstance(inner, ast.Dict):
                for key, value in zip(inner.keys, inner.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == index:
                        yield from self.walk(value, place, here, depth - 1)
                        return
            if isinstance(inner, ast.Call):
                called = self.called(inner, place)
                if called is not None:
                    for value, where in called:
                        picked = value
                        if isinstance(value, ast.Tuple) and isinstance(index, int) and index < len(value.elts):
                            picked = value.elts[index]
                        elif isinstance(value, ast.Dict):
                            picked = next((v for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant) and k.value == index), value)
                        yield from self.walk(picked, where, here, depth - 1)
                    return
                if here.trail and SPEAKING.search(here.trail[-1]):
                    line = here.uses[-1][2].line if here.uses and here.uses[-1][2].file == place.file else inner.lineno
                    yield replace(here, node=ast.Name(id=here.trail[-1], ctx=ast.Load(), lineno=line, col_offset=0, end_lineno=line, end_col_offset=0))
                else:
                    yield replace(here, node=inner)
                return
        yield from self.walk(node.value, place, here, depth - 1)


    def call(self, node: ast.Call, place: Place, here: Term, depth: int) -> Iterator[Term]:
        name = script.call_name(node)
        method = isinstance(node.func, ast.Attribute) and not (isinstance(node.func.value, ast.Name) and node.func.value.id in LIBRARIES) \
            and not (isinstance(node.func.value, ast.Attribute) and script.call_name(node) and node.func.value.attr in LIBRARIES)
        operands: list[ast.expr] = ([node.func.value] if method and isinstance(node.func, ast.Attribute) else []) + list(node.args)
        if name in NO_GRADIENT and method and self.stop is None:
            return
        if name in self.halt:
            yield here
            return
        if name in ("neg", "negative") and operands:
            yield from self.walk(operands[0], place, replace(here, sign=-here.sign, flipped=node.lineno), depth)
        elif name in ("add", "sub", "mul", "div", "multiply", "subtract", "true_divide") and len(operands) == 2:
            kind = {"add": ast.Add, "sub": ast.Sub, "subtract": ast.Sub, "mul": ast.Mult, "multiply": ast.Mult}.get(name, ast.Div)
            made = ast.BinOp(left=operands[0], op=kind(), right=operands[1])
            yield from self.walk(ast.copy_location(made, node), place, here, depth - 1)
        elif (called := self.called(node, place)) is not None:
            for value, where in called:
                first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
                yield from self.walk(first, where, replace(here, trail=(*here.trail, name), uses=(*here.uses, (name, here.sign, Location(place.file, node.lineno)))), depth - 1)
        elif name in ("scale", "values") and operands and (name == "values" or node.args):
            yield from self.walk(node.args[0] if name == "scale" else operands[0], place, here, depth - 1)
        elif name in LINEAR | GROWING and operands:
            chosen = operands[1:] if name == "where" and not method else operands[:1] if name in LINEAR or name in ("clamp", "clip", "topk", "quantile") else operands
            for item in chosen:
                if not isinstance(item, ast.Constant):
                    spot = Location(place.file, node.end_lineno or node.lineno) if name in ("sum", "mean") else here.reduced
                    yield from self.walk(item, place, replace(here, through=(*here.through, name), reduced=spot), depth - 1)
        else:
            yield here


def comprehended(node: ast.ListComp | ast.GeneratorExp, place: Place) -> dict[str, tuple[ast.expr, Place]]:
    """Variables of a comprehension, bound to what they run over (``zip`` and ``enumerate`` taken apart)."""
    found: dict[str, tuple[ast.expr, Place]] = {}
    for generator in node.generators:
        target, source = generator.target, generator.iter
        if isinstance(source, ast.Call) and script.call_name(source) == "zip" and isinstance(target, ast.Tuple):
            found.update({t.id: (a, place) for t, a in zip(target.elts, source.args, strict=False) if isinstance(t, ast.Name)})
        elif isinstance(target, ast.Name):
            found[target.id] = (source, place)
    return found


def objectives(window: Window, expander: Expander | None = None) -> list[Objective]:
    """Every objective of the user's own text whose backward ran (or that a framework's hook returns)."""
    expander = expander or Expander(window)
    ran = {(f.at.file, f.at.line) for f in window.facts("backward") if f.at is not None}
    found = []
    for file in window.sources:
        module = script.tree(window, file)
        for node, scope, owner in scoped(module) if module is not None else ():
            root: ast.expr | None = None
            if isinstance(node, ast.Call) and script.call_name(node) in ("backward", "manual_backward"):
                if ran and not any(f == file and node.lineno <= line <= (node.end_lineno or node.lineno) for f, line in ran):
                    continue
                base = node.func.value if isinstance(node.func, ast.Attribute) else None
                foreign = bool(node.args) and (isinstance(base, ast.Name | ast.Attribute)) and not re.search(r"loss|obj", ast.unparse(base), re.I)
                root = node.args[0] if foreign else base
            elif isinstance(node, ast.Return) and isinstance(scope, ast.FunctionDef) and scope.name in ("training_step", "compute_loss") and owner is not None:
                root = node.value
                if isinstance(root, ast.Call) and script.call_name(root) in ("OrderedDict", "dict"):
                    root = next((k.value for k in root.keywords if k.arg == "loss"), root.args[0] if root.args else root)
                if isinstance(root, ast.Dict):
                    root = next((v for k, v in zip(root.keys, root.values, strict=True) if isinstance(k, ast.Constant) and k.value == "loss"), None)
                if isinstance(root, ast.IfExp):
                    root = root.orelse
                if isinstance(root, ast.Tuple) and root.elts:
                    root = root.elts[0]
            if root is not None:
                place = Place(file, scope, int(getattr(node, "lineno", 1)), {}, owner)
                expander.budget = 1500
                line = int(getattr(node, "lineno", 1))
                found.append(Objective(Location(file, line), root, place, tuple(expander.walk(root, place))))
    return found
