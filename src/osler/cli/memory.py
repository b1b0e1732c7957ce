"""Whether the kernel killed something for lack of memory: the kill counters before and after, no log, no privilege."""

from __future__ import annotations

from pathlib import Path

CONTROL = Path("/sys/fs/cgroup")


def counters() -> dict[str, int]:
    """Kill counters by file: of the own control group (version 1 and 2), and of the whole machine."""
    found: dict[str, int] = {}
    for path in (*own_groups(), Path("/proc/vmstat")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.strip().isdigit():
                found[str(path)] = int(number)
    return found


def own_groups() -> list[Path]:
    """Where the counters of this process's control group may be; inside a container the group is the root."""
    paths = [CONTROL / "memory.events", CONTROL / "memory" / "memory.oom_control"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return paths
    for line in lines:
        _, controllers, group = line.split(":", 2)
        group = group.lstrip("/")
        if not controllers:
            paths.append(CONTROL / group / "memory.events")
        elif "memory" in controllers.split(","):
            paths.append(CONTROL / "memory" / group / "memory.oom_control")
    return list(dict.fromkeys(paths))


def killed_since(before: dict[str, int]) -> bool:
    """Whether any counter rose."""
    return any(number > before.get(path, number) for path, number in counters().items())
