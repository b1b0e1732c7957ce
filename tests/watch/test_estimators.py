"""Fits and divisions of scikit-learn, by which rows they had; its classes stay what they were."""

import copy
import inspect
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from osler.watch.taps.estimators import PACKAGES, SPLITS, Estimators, Finder, fingerprint, patch, wanted


class Guard:
    def __init__(self):
        self.failures = []

    def armed(self, tap):
        return True

    def failed(self, tap):
        self.failures.append(sys.exc_info()[1])


@pytest.fixture
def watched(monkeypatch):
    """Own copies of the classes that are patched, so that no other test sees a patch."""
    pytest.importorskip("sklearn")
    from sklearn import base, feature_selection, preprocessing
    from sklearn.model_selection import _split
    facts = []
    session = SimpleNamespace(guard=Guard(), main_thread=threading.get_ident(), in_child=False, fact=lambda kind, at, **data: facts.append((kind, data)))
    owner = Estimators(session)
    modules = [base, _split, sys.modules[preprocessing.StandardScaler.__module__], sys.modules[feature_selection.SelectKBest.__module__],
               sys.modules[feature_selection.SelectKBest.__mro__[1].__module__], sys.modules["sklearn.feature_selection._base"]]
    for module in modules:
        for cls in [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]:
            for name in ("fit", "transform", "fit_transform", "partial_fit", "split"):
                if name in cls.__dict__:
                    monkeypatch.setattr(cls, name, cls.__dict__[name])
    monkeypatch.setattr(_split, "_validate_shuffle_split", _split._validate_shuffle_split)
    for module in modules:
        patch(owner, module)
    yield facts
    assert session.guard.failures == []


X = np.random.default_rng(0).normal(size=(80, 6))
Y = (X[:, 0] > 0).astype(int)


def test_rows_that_came_out_of_a_fit_are_known_when_they_are_divided(watched):
    from sklearn.feature_selection import SelectKBest
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    scaled = StandardScaler().fit_transform(X)
    best = SelectKBest(k=3)
    best.fit(scaled, Y)
    train_test_split(best.transform(scaled).astype(np.float32), Y, test_size=20, random_state=1)
    assert [(kind, d.get("class", d.get("function")), d["rows"], d.get("y"), d.get("parents", d.get("made_by"))) for kind, d in watched] == [
        ("sklearn-fit", "StandardScaler", 80, False, []), ("sklearn-fit", "SelectKBest", 80, True, [0]), ("sklearn-split", "train_test_split", 80, None, [1])]
    assert watched[-1][1]["sizes"] == [60, 20] and watched[-1][1]["random_state"] == 1


def test_a_scaler_of_other_rows_is_not_behind_these(watched):
    from sklearn.model_selection import KFold
    from sklearn.preprocessing import StandardScaler
    scaled = StandardScaler().fit(X + 1).transform(X)
    assert len(list(KFold(4).split(scaled))) == 4
    assert [(k, d.get("made_by")) for k, d in watched] == [("sklearn-fit", None), ("sklearn-split", [])]


def test_folds_of_a_pipeline_are_fits_of_a_part(watched):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    cross_val_score(make_pipeline(StandardScaler(), LogisticRegression()), X, Y, cv=2)
    assert [k for k, _ in watched] == ["sklearn-split", "sklearn-fit", "sklearn-fit"] and {d["rows"] for k, d in watched if k == "sklearn-fit"} == {40}
    assert watched[0][1]["function"] == "StratifiedKFold" and watched[0][1]["made_by"] == []


def test_clones_pickles_and_signatures_are_what_they_were(watched):
    from sklearn.base import clone
    from sklearn.preprocessing import StandardScaler
    scaler = StandardScaler().fit(X)
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert np.array_equal(other.transform(X), scaler.transform(X))
    assert "_osler_watches" not in vars(clone(scaler)) and pickle.loads(pickle.dumps(StandardScaler.fit)) is StandardScaler.fit
    assert list(inspect.signature(StandardScaler.fit).parameters) == ["self", "X", "y", "sample_weight"]
    with pytest.raises(ValueError, match="Expected 2D array"):
        StandardScaler().fit(X[:, 0])


def test_fingerprints_tell_rows_not_copies():
    pandas = pytest.importorskip("pandas")
    assert fingerprint(X) == fingerprint(X.astype(np.float32)) == fingerprint(pandas.DataFrame(X)) != fingerprint(X + 1)
    assert fingerprint(["a b"] * 30) != fingerprint(["a c"] * 30) and fingerprint(X[:5]) is None


def test_a_module_is_patched_after_it_was_executed(tmp_path, monkeypatch):
    package = tmp_path / "imblearn"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "over.py").write_text("class Twice:\n    def fit_resample(self, X, y):\n        return [*X, *X], [*y, *y]\n")
    facts = []
    session = SimpleNamespace(guard=Guard(), main_thread=threading.get_ident(), in_child=False, fact=lambda kind, at, **data: facts.append((kind, data)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    owner = Estimators(session)
    sys.meta_path.insert(0, Finder(owner))
    try:
        from imblearn.over import Twice
        rows, _ = Twice().fit_resample([[float(i)] for i in range(30)], [0] * 30)
        assert len(rows) == 60 and [(k, d["method"], d["rows"], d["y"]) for k, d in facts] == [("sklearn-fit", "fit_resample", 30, True)]
        assert owner.sources(rows) == {0}
    finally:
        for name in ("imblearn", "imblearn.over"):
            sys.modules.pop(name, None)


def test_nothing_is_imported_for_it():
    code = ("import sys, threading; from types import SimpleNamespace as S; from osler.watch.taps import estimators as e; "
            "e.install(None, e.Estimators(S())); print('sklearn' in sys.modules, any(type(f).__name__ == 'Finder' for f in sys.meta_path))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "True"]
    assert wanted(SPLITS) and wanted(PACKAGES[1] + "._data") and not wanted("sklearn.linear_model._base")
