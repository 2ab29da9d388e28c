"""Rows (measured values with their bounds), their table, and the CPU time and memory of a process from /proc."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured value. With a `ratio`, `bound` is the smallest allowed ratio; otherwise it is the largest `value`.

    `ceiling` is what `against` reached, in the same unit. `cpu_us` is the server's CPU time per operation in µs.
    """

    name: str
    value: float
    unit: str
    against: str
    bound: float
    ceiling: float | None = None
    ratio: float | None = None
    cpu_us: float | None = None
    note: str = ""
    holds: bool = True
    """False if another condition of the row is not met, for example if a connection was refused."""

    @property
    def ok(self) -> bool:
        """Return whether the value is within its bound and `holds` is true."""
        within = self.ratio >= self.bound if self.ratio is not None else self.value <= self.bound
        return within and self.holds

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written to `bench.json`."""
        return {k: _short(v) for k, v in asdict(self).items() if k != "holds"} | {"ok": self.ok}


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def table(rows: list[Row]) -> str:
    """Return the rows as a text table: one line for each row, and its note, if any, on the next line."""
    head = ("row", "value", "against", "ceiling", "ratio", "bound", "CPU µs/op", "")
    body = [_cells(row) for row in rows]
    widths = [max(len(line[n]) for line in [head, *body]) for n in range(len(head))]
    lines = [_line(head, widths), _line(tuple("-" * width for width in widths), widths)]
    for row, cells in zip(rows, body, strict=True):
        lines.append(_line(cells, widths))
        lines += [f"    {row.note}"] if row.note else []
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    percent = row.ratio is not None
    return (
        row.name,
        f"{_number(row.value)} {row.unit}",
        row.against,
        _number(row.ceiling) if row.ceiling is not None else "",
        f"{row.ratio:.0%}" if row.ratio is not None else "",
        f">= {row.bound:.0%}" if percent else f"<= {_number(row.bound)}",
        _number(row.cpu_us) if row.cpu_us is not None else "",
        "ok" if row.ok else "MISSED",
    )


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    right = {1, 3, 4, 5, 6}
    padded = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True)))
    return "  ".join(padded).rstrip()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all living threads of a process, in nanoseconds if the kernel has schedstat."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return sum(int(Path(f"/proc/{pid}/task/{t}/schedstat").read_text().split()[0]) for t in threads) / 1e9
    except FileNotFoundError:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rss_kb(pid: int) -> int:
    """Return the resident memory of a process in kB."""
    return _read_status_kb(pid, "VmRSS:")


def anonymous_kb(pid: int) -> int:
    """Return the resident memory in kB that a process allocated itself, without the files that it maps."""
    return _read_status_kb(pid, "RssAnon:")


def _read_status_kb(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def median(values: list[float]) -> float:
    """Return the median; of an even number of values the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
