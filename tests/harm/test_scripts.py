"""Do no harm: every script prints the same numbers, parameters, random state, warnings and tracebacks with and without osler."""

from __future__ import annotations

from pathlib import Path

import pytest
from side_by_side import SCRIPTS, WATCH, Outcome, differences, environment, launcher, own_failures, recorded, run

ARGUMENTS = {
    "loader_workers": [["0"], ["fork"], ["spawn"], ["forkserver"]],
    "checkpointing": [["reentrant"], ["plain"]],
    "amp": [["bf16"], ["fp16"]],
    "compile_model": [["eager", "fullgraph"], ["eager", "breaks"], ["aot_eager", "fullgraph"]],
    "exits": [["code"], ["text"], ["abrupt"], ["segfault"], ["interrupt"], ["terminate"], ["kill"]],
    "ddp": [["spawn"], ["torchrun"]],
    "streams": [["--flag", "two words"]],
}
QUICK = {"plain_mlp", "gan", "lbfgs", "pickling", "raises", "versions_and_graph", "garbage", "transformer_encoder", "streams",
         "user_modes", "no_torch"}
SILENT = {"no_torch"}
"""Scripts in which no process trains: osler has nothing to record."""
ELSEWHERE = {"meta_device"}
"""In test_source.py."""


def cases() -> list:
    found = []
    for path in sorted(SCRIPTS.glob("[!_]*.py")):
        if path.stem in ELSEWHERE:
            continue
        for arguments in ARGUMENTS.get(path.stem, [[]]):
            marks = [] if path.stem in QUICK else [pytest.mark.slow]
            found.append(pytest.param(path.stem, arguments, id="-".join([path.stem, *arguments]).replace(" ", "_"), marks=marks))
    return found


def steady(command: list[str], folder: Path, env: dict[str, str], stdin: bytes) -> Outcome:
    """Again where gloo's threads outlived their process, which happens on a busy machine, watched or not."""
    for _ in range(3):
        outcome = run(command, folder, env, stdin=stdin)
        if b"terminate called without an active exception" not in outcome.stderr:
            break
    return outcome


@pytest.mark.parametrize(("name", "arguments"), cases())
def test_same_with_and_without(name: str, arguments: list[str], scripts: Path, runs: Path) -> None:
    plain, after = launcher(f"{name}.py", arguments)
    env = environment(runs)
    stdin = b"line one\nline two" if name == "streams" else b""
    alone = steady(plain, scripts, env, stdin)
    watched = steady([*WATCH, *after], scripts, env, stdin)
    assert not differences(alone, watched), "\n".join(differences(alone, watched)) + "\n" + watched.our_stderr
    breaks = scripts / "graph-breaks.txt"
    if breaks.exists():
        counted = dict(line.split() for line in breaks.read_text().splitlines())
        breaks.unlink()
        assert int(counted["watched"]) <= int(counted["alone"])
    if name not in SILENT:
        assert recorded(runs), "nothing was recorded, so this test showed nothing"
        assert not own_failures(runs)
