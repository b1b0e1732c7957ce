"""osler with an engine that finds what the run's ``fake`` facts say, so that its voice can be tested without faults."""

import os
import sys

from osler.cli import main
from osler.core.finding import Finding, Where
from osler.diagnose import engine
from osler.report import terminal


def diagnose(window, config=None):
    if os.environ.get("FAKE_CRASH") == "always" or (os.environ.get("FAKE_CRASH") == "live" and not window.final):
        raise RuntimeError("the engine broke")
    found = [Finding(f["cause"], f.get("certainty", "certain"), f["severity"], f["title"], "Change it", Where(f.at.file, f.at.line))
             for f in window.facts("fake")]
    return engine.Verdict(tuple(found), checked=("grad-not-cleared",))


def one_line(finding):
    with open("said", "w"):
        return original(finding)


engine.diagnose = diagnose
original, terminal.one_line = terminal.one_line, one_line
if __name__ == "__main__":
    if sys.argv[1] == "sidecar":
        from osler import sidecar

        sys.exit(sidecar.main(sys.argv[2:]))
    main.main()
