"""This process's memory cgroup: how often the kernel has killed in it, and its limit. cgroup v2 and v1."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Out-of-memory kills in our cgroup so far; 0 where it cannot be read."""
    for folder in _folders(root, membership):
        for name in ("memory.events", "memory.oom_control"):
            for line in _lines(folder / name):
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.strip().isdigit():
                    return int(value)
    return 0


def memory_limit(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The lowest limit that holds for us in bytes: of our cgroup or one above it, or the machine's memory."""
    found: list[int] = []
    for folder in _folders(root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            for line in _lines(folder / name):
                if line.strip().isdigit() and int(line) < 2**60:
                    found.append(int(line))
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemTotal:"):
            found.append(int(line.split()[1]) * 1024)
    return min(found, default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    """Our own cgroup's folder first, then those above it."""
    folders: list[Path] = []
    for line in _lines(membership):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        folder = base / path.strip().lstrip("/")
        while folder != base and base in folder.parents:
            folders.append(folder)
            folder = folder.parent
        folders.append(base)
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
