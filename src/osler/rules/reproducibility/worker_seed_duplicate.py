from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import VALIDATION, construction, loaders, roles
from osler.rules.script import FUNCTIONS, LOOPS, Function, bound, call_name, calls, dotted, trains, tree, words

SEEDS = frozenset(("manual_seed", "seed"))
MAKERS = frozenset(("RandomState", "default_rng", "Random"))
PER_WORKER = re.compile(r"initial_seed|get_worker_info|worker_info|worker_seed|base_seed|urandom|SeedSequence|get_state|epoch|getpid|time", re.I)
HELD_OUT = re.compile(r"(^|_)(val|valid|validate|validation|eval|evaluate|evaluation|test|metrics|score|generate|deterministic|probe|fixed|vis|plot|sample|demo|preview)(_|$|\d|uate)", re.I)
AUGMENTS = re.compile(r"aug|noise|noisy|jitter|flip|crop|drop|mask|shift|roll|rot|perturb|transform|corrupt|mix|scale|erase|warp", re.I)


@rule("worker-seed-duplicate", "reproducibility")
def check(window: Window) -> Iterator[Finding]:
    """Loader workers, or epochs, repeat the same random numbers.

    **What it is.** A worker_init_fn that seeds every worker alike; a RandomState, Generator or torch.Generator stored in the data set, of
    which each worker gets the same copy in every epoch; a seed set inside `__getitem__` from a constant or from the index
    alone; a seed or generator made anew in every epoch of the training loop.

    **How it is seen.** In the text of the data set, the worker_init_fn and the training loop, together with what was recorded: workers of
    the loader, passes over it, seeds set again between steps, optimizers built (a new model may be seeded anew).

    **Why it matters.** Augmentation that repeats is hardly any: with 4 workers the same noise is added 4 times, or the same crop is seen
    in each epoch; a shuffle that repeats is none.

    **What to do.** Use torch's generator (workers get seeds of their own), or seed from `torch.initial_seed()` in worker_init_fn; seed
    once before the loop; derive a generator from (seed, epoch, index).

    **When this is wrong.** A data set that makes its items up from the index is one on purpose, as is a fixed augmentation of the validation rows;
    neither is reported. ⚠ Since torch 1.9 a missing worker_init_fn is no fault of its own: workers seed NumPy too.

    **Source.** Handbook B §14; PyTorch notes on randomness in multi-process loading; pytorch issue 5059.
    """
    said = False
    for finding in (*worker_init(window), *stored(window), *per_item(window), *sampler_order(window), *per_epoch(window)):
        said = True
        yield finding
        break
    if not said:
        yield from recorded(window)


def finding(window: Window, file: str, line: int, title: str, fix: str, text: str = "", treatment: str = "worker-seed") -> Finding:
    return Finding("worker-seed-duplicate", "certain", "harmful", title, fix, Where.at(Location(file, line)),
                   evidence=(Evidence(text or f"`{window.line(file, line).strip()}`", "source", None, None, 1),), treatment=treatment, explains=("overfit",))


def training_loaders(window: Window) -> list[Fact]:
    known, role = loaders(window), roles(window)
    return [f for i, f in known.items() if role.get(i) != VALIDATION]


def passes(window: Window) -> int:
    """Most passes over one training loader."""
    rows = window.stream("batches")
    return max((int(rows["pass_"][rows["loader"] == f.get("index")].max(initial=-1)) + 1 for f in training_loaders(window)), default=0)


def arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(k.value for k in call.keywords)]


def seeding(node: ast.AST) -> Iterator[ast.Call]:
    """Calls that set a seed or make a seeded generator."""
    for c in calls(node):
        name = call_name(c)
        if (name in SEEDS and arguments(c) and isinstance(c.func, ast.Attribute)) or (name in MAKERS and arguments(c)):
            yield c


def given_names(function: Function | ast.Lambda) -> list[str]:
    return [a.arg for a in function.args.args if a.arg not in ("self", "cls")]


def derived(function: ast.AST, names: set[str]) -> set[str]:
    """Local names that are computed from any of these."""
    found = set(names)
    for _ in range(3):
        for s in ast.walk(function):
            if isinstance(s, ast.Assign) and found & words(s.value):
                found |= {n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def feeds(function: ast.AST, names: set[str]) -> set[str]:
    """All words that these local names were computed from."""
    found = set(names)
    for _ in range(3):
        for s in ast.walk(function):
            if isinstance(s, ast.Assign) and {n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)} & found:
                found |= words(s.value)
    return found


def worker_init(window: Window) -> Iterator[Finding]:
    """The function given as worker_init_fn seeds all workers alike, or each one alike in every epoch."""
    for f in training_loaders(window):
        call = construction(window, f)
        if call is None or f.at is None or int(f.get("workers") or 0) < 1:
            continue
        module = tree(window, f.at.file)
        given = next((k.value for k in call.keywords if k.arg == "worker_init_fn"), None)
        persistent = any(k.arg == "persistent_workers" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in call.keywords)
        if given is None or module is None:
            continue
        name = given.id if isinstance(given, ast.Name) else given.attr if isinstance(given, ast.Attribute) else call_name(given) if isinstance(given, ast.Call) and call_name(given) != "partial" \
            else ast.unparse(given.args[0]) if isinstance(given, ast.Call) and given.args else ""
        function: ast.AST | None = given if isinstance(given, ast.Lambda) else next((n for n in ast.walk(module) if isinstance(n, FUNCTIONS) and n.name == name), None)
        if not isinstance(function, ast.Lambda | ast.FunctionDef):
            continue
        parameters = given_names(function)
        worker = set(parameters[-1:] if isinstance(given, ast.Call) else parameters[:1])
        for c in seeding(function):
            library = "numpy" if "random" in ast.unparse(c.func) and re.match(r"(np|numpy)\.", ast.unparse(c.func)) else "torch" if "torch" in ast.unparse(c.func) else "random"
            if not draws(window, module, library):
                continue
            source = feeds(function, {w for a in arguments(c) for w in words(a)})
            if PER_WORKER.search(" ".join(source)):
                continue
            if not (source & worker) and int(f.get("workers") or 0) >= 2:
                yield finding(window, f.at.file, c.lineno, f"Every worker seeds {library} with the same number, so {f.get('workers')} workers repeat each other",
                              "Seed from torch.initial_seed() % 2**32, which differs by worker and by epoch.")
            elif not persistent and passes(window) >= 2:
                yield finding(window, f.at.file, c.lineno, f"Workers seed {library} with their number alone, so every epoch repeats the random numbers of the first",
                              "Seed from torch.initial_seed() % 2**32, which differs by worker and by epoch.")



def draws(window: Window, module: ast.Module, library: str) -> bool:
    """Whether items of a data set draw from that library: as measured, or as the text says."""
    uses = {u for f in window.facts("experiment") if f.get("name") == "item-repeat" for u in f.get("uses") or ()}
    if library in uses:
        return True
    pattern = {"numpy": r"\b(np|numpy)\.random\.(?!seed|RandomState|default_rng|get_state|set_state)", "random": r"(?<![.\w])random\.(?!seed|Random\b|getstate|setstate)",
               "torch": r"torch\.(rand|randn|randint|randperm|bernoulli|normal|rand_like|randn_like)|\.(normal_|uniform_|bernoulli_)"}[library]
    return any(re.search(pattern, ast.unparse(n)) for n in ast.walk(module) if isinstance(n, ast.ClassDef) and any(isinstance(m, FUNCTIONS) and m.name in ("__getitem__", "__iter__", "__call__", "forward") for m in n.body))


def data_classes(module: ast.Module) -> Iterator[tuple[ast.ClassDef, dict[str, Function]]]:
    for n in ast.walk(module):
        if isinstance(n, ast.ClassDef):
            methods: dict[str, Function] = {m.name: m for m in n.body if isinstance(m, FUNCTIONS)}
            if methods:
                yield n, methods


def stored(window: Window) -> Iterator[Finding]:
    """A generator that lives in the data set (or a transform of it) and is copied into each worker."""
    busy = [f for f in training_loaders(window) if int(f.get("workers") or 0) >= 1]
    if not busy:
        return
    several = max(int(f.get("workers") or 0) for f in busy) >= 2
    for file in {f.at.file for f in busy if f.at is not None}:
        module = tree(window, file)
        if module is None:
            continue
        inits = {w for c in calls(module) for k in c.keywords if k.arg == "worker_init_fn" for w in words(k.value)}
        reseeds = " ".join(w for n in ast.walk(module) if isinstance(n, FUNCTIONS) and n.name in inits for w in words(n))
        for cls, methods in data_classes(module):
            drawing = [methods[m] for m in ("__getitem__", "__iter__", "__call__", "__getitems__") if m in methods]
            if not drawing or cls.name.endswith("Sampler"):
                continue
            for s in ast.walk(methods["__init__"]) if "__init__" in methods else ():
                if not isinstance(s, ast.Assign) or not any(call_name(c) in (*MAKERS, "Generator") for c in calls(s.value)):
                    continue
                names = {t.attr for t in s.targets if isinstance(t, ast.Attribute)}
                used = [m for m in methods.values() if m.name != "__init__" and any(isinstance(n, ast.Attribute) and n.attr in names for n in ast.walk(m))]
                again = any(isinstance(a, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr in names for t in a.targets) for m in used for a in ast.walk(m)) or any(
                    call_name(c) in SEEDS and names & words(c.func) for m in used for c in calls(m))
                if names and used and not again and not any(n in reseeds for n in names) and (several or passes(window) >= 2):
                    yield finding(window, file, s.lineno, f"The generator {sorted(names)[0]} of {cls.name} is copied into every worker, so workers and epochs repeat its numbers",
                                  "Draw with torch's global generator, or make the generator in worker_init_fn from torch.initial_seed().")
            if "__iter__" in methods and not PER_WORKER.search(" ".join(words(methods["__iter__"]))) and several and "__getitem__" not in methods:
                for c in seeding(methods["__iter__"]):
                    yield finding(window, file, c.lineno, f"{cls.name}.__iter__ starts the same generator in every worker and every epoch",
                                  "Add torch.utils.data.get_worker_info().id and the epoch to the seed.")


def sampler_order(window: Window) -> Iterator[Finding]:
    """A sampler that shuffles with the same generator at every pass."""
    if passes(window) < 2:
        return
    for file in {f.at.file for f in training_loaders(window) if f.at is not None}:
        module = tree(window, file)
        for cls, methods in data_classes(module) if module is not None else ():
            body = methods.get("__iter__")
            if body is None or not any("Sampler" in ast.unparse(b) for b in cls.bases):
                continue
            for c in seeding(body):
                source = feeds(body, {w for a in arguments(c) for w in words(a)})
                if not PER_WORKER.search(" ".join(source)) and constant_seed(source, cls):
                    yield finding(window, file, c.lineno, f"{cls.name} shuffles with the same seed at every pass, so all epochs have one order", "Add the epoch to the seed (set_epoch).", treatment="seed")


def per_item(window: Window) -> Iterator[Finding]:
    """A seed set inside ``__getitem__`` from a constant or from the index alone."""
    known = training_loaders(window)
    held_out = {str(f.get("dataset")) for i, f in loaders(window).items() if roles(window).get(i) == VALIDATION} - {str(f.get("dataset")) for f in known}
    for file in {f.at.file for f in window.all_facts if f.at is not None}:
        module = tree(window, file)
        for cls, methods in data_classes(module) if module is not None else ():
            item = methods.get("__getitem__")
            if item is None or cls.name in held_out or HELD_OUT.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.name)):
                continue
            index = given_names(item)[:1]
            for c in seeding(item):
                source = feeds(item, {w for a in arguments(c) for w in words(a)})
                condition = [s for s in ast.walk(item) if isinstance(s, ast.If) and any(x is c for x in ast.walk(s))]
                if PER_WORKER.search(" ".join(source)) or any(re.search(r"train|eval|val|test|mode|split|augment|determin|fixed", ast.unparse(s.test)) for s in condition):
                    continue
                if leaves_early(item, c):
                    continue
                data = reads_data(item, set(index))
                if not (source & set(index)) and not any(call_name(x) in ("random", "rand", "randint", "integers") for a in arguments(c) for x in calls(a)):
                    if constant_seed(source, cls):
                        yield finding(window, file, c.lineno, "Every item sets the same seed, so all items get the same random numbers",
                                      "Seed once, before the loop; use a generator derived from (seed, epoch, index) if items must be repeatable.")
                elif source & set(index) and data and augments(cls, item) and (passes(window) >= 2 or not known):
                    yield finding(window, file, c.lineno, "The random numbers of an item depend on its index alone, so every epoch repeats the same augmentation",
                                  "Derive the generator from (seed, epoch, index), or draw from the global one.")


def leaves_early(item: Function, seed: ast.Call) -> bool:
    """Training rows have been returned before the seed is set: what follows serves validation."""
    for s in item.body:
        if isinstance(s, ast.If) and s.lineno < seed.lineno and any(isinstance(b, ast.Return) for b in ast.walk(s)) and re.search(r"train|aug", ast.unparse(s.test)) and "not " not in ast.unparse(s.test):
            return True
    return False


def constant_seed(source: set[str], cls: ast.ClassDef) -> bool:
    """Nothing in the seed changes from item to item: no counter that the class moves on."""
    moved = {t.attr for s in ast.walk(cls) if isinstance(s, ast.AugAssign) for t in [s.target] if isinstance(t, ast.Attribute)}
    moved |= {t.attr for m in cls.body if isinstance(m, FUNCTIONS) and m.name != "__init__" for s in ast.walk(m) if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Attribute)}
    return not moved & source


def reads_data(item: Function, index: set[str]) -> bool:
    """The item is read from something stored (`self.x[i]`), not made up."""
    local, made = derived(item, index), bound(item)
    return any(isinstance(n, ast.Subscript) and local & words(n.slice) and (isinstance(n.value, ast.Attribute) or (isinstance(n.value, ast.Name) and n.value.id not in made))
               for n in ast.walk(item)) or any(
        call_name(c) in ("open", "load", "imread", "read_image", "__getitem__") for c in calls(item))


def augments(cls: ast.ClassDef, item: Function) -> bool:
    """The numbers change what was read, rather than choose a sample or a label."""
    return bool(AUGMENTS.search(" ".join(sorted(words(item))) + " " + cls.name)) or any(
        call_name(c) in ("normal", "randn", "standard_normal", "uniform", "rand", "random", "randn_like", "rand_like") for c in calls(item))


def per_epoch(window: Window) -> Iterator[Finding]:
    """A seed, or a seeded generator, that is made again in every epoch of one training."""
    built = len(window.facts("optimizer"))
    for file in {f.at.file for f in window.facts("optimizer") if f.at is not None} | {f.at.file for f in window.facts("backward") if f.at is not None}:
        module = tree(window, file)
        if module is None:
            continue
        functions: dict[str, Function] = {n.name: n for n in ast.walk(module) if isinstance(n, FUNCTIONS)}
        training = {n for n, f in functions.items() if trains(f)}
        for _ in range(3):
            training |= {n for n, f in functions.items() if any(call_name(c) in training for c in calls(f))}
        for loop in (n for n in ast.walk(module) if isinstance(n, LOOPS)):
            if not trains(loop, frozenset(training)):
                continue
            reach = [loop, *(functions[call_name(c)] for c in calls(loop) if call_name(c) in functions)]
            reach += [functions[call_name(c)] for f in reach[1:] for c in calls(f) if call_name(c) in functions]
            built_here = [n for n in ast.walk(module) if isinstance(n, ast.ClassDef) and any(call_name(c) == n.name for r in reach for c in calls(r))]
            if any(re.search(r"optim\.|^(SGD|Adam|AdamW|RMSprop|Adagrad)$|configure_optimizers", ast.unparse(c.func)) for r in (*reach, *built_here) for c in calls(r)):
                continue
            moving = bound(loop)
            for place in reach:
                local = given_names(place) if isinstance(place, ast.FunctionDef) else []
                for c in seeding(place):
                    if not own_seed(c, place, loop, module):
                        continue
                    source = feeds(place, {w for a in arguments(c) for w in words(a)})
                    text = " ".join(source)
                    if PER_WORKER.search(text) or source & moving or (set(local) & source) or HELD_OUT.search(target_name(module, c)) or inside_guard(module, c):
                        continue
                    again = repeated(window, file, c.lineno)
                    counted = ast.unparse(c.func) == "torch.manual_seed" and len(window.facts("seed")) < 5
                    if built < again or (again < 2 and built <= 1 and not counted):
                        yield finding(window, file, c.lineno, "The same seed is set again in every epoch (or step), so each one repeats the random numbers of the first",
                                      "Seed once before the loop, or add the epoch to the seed.", treatment="seed")


def own_seed(c: ast.Call, place: ast.AST, loop: ast.stmt, module: ast.Module) -> bool:
    """The call sets the global seed, or its generator serves training: not inside a function that is only defined here, nor a test function."""
    if isinstance(place, ast.FunctionDef) and (HELD_OUT.search(place.name) or place.name.startswith("__")):
        return False
    inner = [f for f in ast.walk(place) if isinstance(f, FUNCTIONS) and f is not place and any(x is c for x in ast.walk(f))]
    silent = [s for s in ast.walk(place) if isinstance(s, ast.With) and any(re.search(r"no_grad|inference_mode|fork_rng", ast.unparse(i.context_expr)) for i in s.items)]
    quiet = [s for s in silent if any(x is c for x in ast.walk(s))] or judged_only(place, c, silent)
    iterator = isinstance(loop, ast.For) and any(x is c for x in ast.walk(loop.iter)) and place is loop
    return not inner and not quiet and not iterator and bool(dotted(c.func) or isinstance(c.func, ast.Attribute))


def judged_only(place: ast.AST, c: ast.Call, silent: list[ast.With]) -> list[ast.With]:
    """The generator has a name, and all that use it stand under no_grad: the same draws in every evaluation are meant."""
    made = next((s for s in ast.walk(place) if isinstance(s, ast.Assign) and any(x is c for x in ast.walk(s.value))), None)
    names = {t.id for t in made.targets if isinstance(t, ast.Name)} if made is not None else set()
    inside = {id(n) for s in silent for n in ast.walk(s)}
    uses = [n for n in ast.walk(place) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    return silent if uses and all(id(n) in inside for n in uses) else []


def target_name(module: ast.Module, c: ast.Call) -> str:
    """The names that the value of this call's statement is bound to, and those that take it up."""
    names: set[str] = set()
    for s in ast.walk(module):
        if isinstance(s, ast.Assign) and any(x is c for x in ast.walk(s.value)):
            names |= {n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    found = set(names)
    for s in ast.walk(module):
        if isinstance(s, ast.Assign) and names & words(s.value):
            found |= {n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return " ".join(sorted(found))


def inside_guard(module: ast.Module, c: ast.Call) -> bool:
    """Run once: `if epoch == 0:`, `if self.rng is None:`."""
    return any(isinstance(s, ast.If) and any(x is c for b in s.body for x in ast.walk(b)) for s in ast.walk(module))


def repeated(window: Window, file: str, line: int) -> int:
    return sum(f.at is not None and f.at.file == file and f.at.line == line for f in window.facts("seed"))


def recorded(window: Window) -> Iterator[Finding]:
    """Seeds of torch that were set to the same value between steps, again and again, with one optimizer."""
    groups: dict[tuple[str, object], list[Fact]] = {}
    for f in window.facts("seed"):
        if f.at is not None and f.get("value") is not None and f.step > 0:
            groups.setdefault((str(f.at), f.get("value")), []).append(f)
    made = [f.step for f in window.facts("optimizer")]
    for found in groups.values():
        steps = sorted({f.step for f in found})
        if len(steps) >= 3 and not any(steps[0] <= m <= steps[-1] for m in made) and found[0].at is not None and not HELD_OUT.search(found[0].at.function):
            at = found[0].at
            yield finding(window, at.file, at.line, f"torch is seeded with {found[0].get('value')} again and again during one training", "Seed once before the loop, or add the epoch to the seed.",
                          f"`{window.line(at.file, at.line).strip()}` ran after steps {', '.join(map(str, steps[:5]))}", "seed")
            return
