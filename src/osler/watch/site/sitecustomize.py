# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
"""Python imports this at start-up because ``osler run`` put its folder on PYTHONPATH. It arms a hook on ``import torch``.

Everything else stays as it would be without osler: the sitecustomize that this one shadows is executed in its place, the
folder leaves ``sys.path``, tracebacks show no frame of ours, no file is opened. Standard library only, no ``typing``
(it costs start-up time) and plain syntax, because any Python that a launcher starts comes by here.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MACHINERY = sys.modules["_frozen_importlib"]  # importlib.util offers the same but takes 3 ms to import
PATHS = sys.modules["_frozen_importlib_external"]


def note(run, text):
    """One line in ``attach.log``; a failure here is nobody's problem."""
    try:
        with open(os.path.join(run, "attach.log"), "a") as log:
            log.write(f"pid {os.getpid()} {sys.executable}: {' '.join(text.split())[:500]}\n")
    except Exception:
        pass


def mark(run, name):
    """Tell the supervisor that somebody came by. A folder, because creating one opens no file."""
    try:
        os.mkdir(os.path.join(run, name))
    except OSError:
        pass


class Hook:
    """A ``sys.meta_path`` finder that lets every import pass, attaches once torch has been executed, and finds osler.

    It stays armed until torch's ``exec_module`` really ran (somebody may call ``find_spec("torch")`` first), and stays in
    the list for good: taking it out would make an import of another thread skip a finder.
    """

    def __init__(self, run, home):
        self.run = run
        self.home = home
        self.done = False
        self.asking = set()

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            return None if self.done else self.guarded(self.torch_spec, name, path, target)
        if name == "osler":
            return self.guarded(self.osler_spec, name, path, target)
        if not self.done and "torch" in sys.modules:
            self.attach_late()
        return None

    def guarded(self, find, name, path, target):
        """Ask ``find``, or say "not mine" if it fails or if this thread is asking it already."""
        from _thread import get_ident

        key = (name, get_ident())
        if key in self.asking:
            return None
        self.asking.add(key)
        try:
            return find(name, path, target)
        except Exception:
            return None  # the import machinery asks the other finders itself and gets the same error
        finally:
            self.asking.discard(key)

    def others(self, name, path, target):
        """What the finders after this one answer."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1:]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None

    def torch_spec(self, name, path, target):
        spec = self.others(name, path, target)
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        original = loader.exec_module

        def exec_module(module):
            if loader.__dict__.get("exec_module") is exec_module:
                del loader.exec_module  # from here on the loader is again what it was
            original(module)
            if getattr(module, "__name__", None) == "torch":
                self.attach()

        nameless(exec_module)
        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # an exotic loader: attach_late comes by
        return spec

    def osler_spec(self, name, path, target):
        """The supervisor's own osler, for a Python that has none. A mere folder of this name is none."""
        found = self.others(name, path, target)
        start = os.path.join(self.home or "", "osler", "__init__.py")
        if (found is not None and found.has_location) or not self.home or not os.path.isfile(start):
            return found
        return PATHS.spec_from_file_location(name, start, submodule_search_locations=[os.path.dirname(start)])

    def attach_late(self):
        """Torch came in by another door (a .pth file, a finder before this one): attach as soon as it is complete."""
        try:
            inside = object.__getattribute__(sys.modules["torch"], "__dict__")  # must not wake a lazy module
            if "Tensor" in inside and not getattr(inside["__spec__"], "_initializing", False):
                self.attach()
        except Exception:
            pass

    def attach(self):
        if self.done:
            return
        self.done = True
        mark(self.run, ".torch")
        try:
            from osler.watch.attach import attach

            attach()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            note(self.run, f"attaching: {error!r}")


def nameless(function):
    """Make Python leave this function out of tracebacks and warnings, as it does with its own import machinery."""
    try:
        origin = MACHINERY._call_with_frames_removed.__code__.co_filename
        function.__code__ = function.__code__.replace(co_filename=origin)
    except Exception:
        pass


def arm(run):
    if any(type(finder).__name__ == "Hook" and hasattr(finder, "attach_late") for finder in sys.meta_path):
        return
    mark(run, ".python")
    hook = Hook(run, os.environ.get("OSLER_HOME"))
    sys.meta_path.insert(0, hook)
    if "torch" in sys.modules:
        hook.attach_late()


def ours(folder):
    return isinstance(folder, str) and os.path.abspath(folder) == HERE


def chain():
    """Execute the shadowed sitecustomize in place of this one; where there is none, be "not found" as without osler."""
    spec = PATHS.PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if not ours(folder)])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")
    module = MACHINERY.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    watched = os.environ.get("OSLER_RUN")
    if watched:
        try:
            arm(watched)
        except Exception as error:
            note(watched, f"arming: {error!r}")
    if any(ours(folder) for folder in sys.path):
        sys.path[:] = [folder for folder in sys.path if not ours(folder)]
    nameless(chain)
    chain()
