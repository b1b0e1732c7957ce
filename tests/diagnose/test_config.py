"""Where the configuration comes from, and the one clear line for everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from osler.core.errors import UsageError
from osler.core.rule import rule
from osler.core.window import Window
from osler.diagnose import catalogue, config


@rule("lr-too-high", "optimization")
def check(window: Window, *, threshold: float = 0.1, window_steps: int = 50, strict: bool = False, names: tuple[str, ...] = ("a",)):
    """Test rule."""
    return []


@pytest.fixture(autouse=True)
def one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "RULES", (check,))


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    return inner


def test_the_nearest_pyproject_is_read(tmp_path: Path) -> None:
    inner = project(tmp_path, """
        [tool.osler]
        select = ["wiring", "lr-too-high"]
        ignore = ["label-noise"]
        [tool.osler.rules.lr-too-high]
        threshold = 1
        window-steps = 20
        names = ["x", "y"]
    """)
    found = config.load(inner)
    assert found.select == {"wiring", "lr-too-high"}
    assert found.ignore == {"label-noise"}
    assert found.options == {"lr-too-high": {"threshold": 1.0, "window_steps": 20, "names": ("x", "y")}}
    assert found.path == tmp_path / "pyproject.toml"


def test_the_command_line_adds_and_replaces(tmp_path: Path) -> None:
    inner = project(tmp_path, '[tool.osler]\nselect = ["wiring"]\nignore = ["label-noise"]\nrules.lr-too-high.strict = true\n')
    found = config.load(inner, {"select": ["data"], "ignore": ["wrong-dim"], "rules": {"lr-too-high": {"threshold": 2.0}}})
    assert found.select == {"data"}
    assert found.ignore == {"label-noise", "wrong-dim"}
    assert found.options == {"lr-too-high": {"strict": True, "threshold": 2.0}}


def test_no_file_is_no_configuration(tmp_path: Path) -> None:
    assert config.load(project(tmp_path, "[project]\nname = 'x'\n")) == config.Config()


@pytest.mark.parametrize(("text", "line"), [
    ("ignroe = ['wrong-dim']", r"has no key 'ignroe'.*Did you mean 'ignore'"),
    ("ignore = ['wrong-dims']", r"'ignore' names 'wrong-dims', which is no cause.*Did you mean 'wrong-dim'"),
    ("select = 3", r"'select' must be a list"),
    ("rules = 3", r"'rules' must be a table"),
    ("rules.lr-too-hihg.threshold = 1", r"no rule is called 'lr-too-hihg'.*Did you mean 'lr-too-high'"),
    ("rules.lr-too-high.treshold = 1", r"'lr-too-high' has no option 'treshold'.*Did you mean 'threshold'"),
    ("rules.lr-too-high.threshold = 'much'", r"option 'threshold' of 'lr-too-high' must be like 0.1, not 'much'"),
    ("rules.lr-too-high.strict = 1", r"must be like False, not 1"),
    ("rules.lr-too-high.window_steps = 1.5", r"must be like 50, not 1.5"),
    ("rules.lr-too-high = 1", r"must be a table"),
    ("ignore = [", r"is not valid TOML"),
])
def test_mistakes_are_one_clear_line(tmp_path: Path, text: str, line: str) -> None:
    inner = project(tmp_path, f"[tool.osler]\n{text}\n")
    with pytest.raises(UsageError, match=line) as caught:
        config.load(inner)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)


def test_mistakes_on_the_command_line_name_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"command line: 'ignore' names 'grad-not-cleard'.*Did you mean 'grad-not-cleared'"):
        config.load(tmp_path, {"ignore": ["grad-not-cleard"]})


def test_without_a_toml_parser_only_a_used_table_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "parser", lambda: None)
    inner = project(tmp_path, "[tool.osler]\nignore = ['wrong-dim']\n")
    with pytest.raises(UsageError, match="tomli"):
        config.load(inner)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'osler-user'\n")
    assert config.load(inner) == config.Config()
