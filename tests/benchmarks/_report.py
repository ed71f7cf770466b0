"""What every benchmark shares: timing commands side by side, and one form of report.

Ours and the peers run in turn in one process tree, medians are reported, CPU time beside wall time: on a busy
machine CPU seconds and ratios are what counts. `--json FILE` writes {"rows": [{"case", "system", "metric",
"value", "unit"}], "ratios": {"case/peer": ours over peer}}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

OURS = "secure-train"


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, and its peak resident memory in bytes."""

    wall: float
    cpu: float
    memory: int


@dataclass
class Report:
    """Collects medians and prints them as a table."""

    title: str
    rows: list[dict[str, str | float]] = field(default_factory=list)

    def race(self, case: str, systems: Mapping[str, Callable[[], Cost]], repeat: int) -> None:
        """Run all systems in turn, `repeat` times, and note the medians."""
        costs: dict[str, list[Cost]] = {name: [] for name in systems}
        for _ in range(repeat):
            for name, action in systems.items():
                costs[name].append(action())
        for name, found in costs.items():
            self.note(case, name, "wall", statistics.median(cost.wall for cost in found), "s")
            self.note(case, name, "cpu", statistics.median(cost.cpu for cost in found), "s")
            self.note(case, name, "memory", max(cost.memory for cost in found) / 1e6, "MB")
        print(f"  measured: {case}", file=sys.stderr, flush=True)

    def note(self, case: str, system: str, metric: str, value: float, unit: str) -> None:
        self.rows.append(
            {"case": case, "system": system, "metric": metric, "value": round(value, 4), "unit": unit}
        )

    def ratios(self) -> dict[str, float]:
        """Ours over each peer, by case and metric; below 1 we need less."""
        ours = {
            (row["case"], row["metric"]): float(row["value"]) for row in self.rows if row["system"] == OURS
        }
        return {
            f"{row['case']} {row['metric']}/{row['system']}": round(
                ours[row["case"], row["metric"]] / float(row["value"]), 3
            )
            for row in self.rows
            if row["system"] != OURS and (row["case"], row["metric"]) in ours and float(row["value"])
        }

    def finish(self, file: Path | None) -> None:
        print(f"\n{self.title}\n")
        for row in self.rows:
            print(
                f"  {row['case']:<38} {row['system']:<26} {row['metric']:<8} {row['value']:>12,.3f} "
                f"{row['unit']}"
            )
        print("\n  ours over the peer (below 1: we need less)\n")
        for name, value in self.ratios().items():
            print(f"  {name:<76} {value:>8.3f}")
        if file:
            file.write_text(json.dumps({"rows": self.rows, "ratios": self.ratios()}, indent=1) + "\n")


def command(arguments: Sequence[str | Path], **environment: str) -> Cost:
    """Run a command to its end and give its cost; a failure stops the benchmark, because a wrong answer has
    no speed.
    """
    begun = monotonic()
    with (
        open(os.devnull, "wb") as nothing,
        subprocess.Popen(
            [str(item) for item in arguments],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=nothing,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(
            f"{' '.join(map(str, arguments))}: exit "
            f"{process.returncode}\n{said.decode(errors='replace')[-2000:]}"
        )
    return Cost(monotonic() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="runs of each system and case (default 3)"
    )
    return parser


def gate() -> Path:
    """The programs of the built gate environment."""
    return Path(os.environ["SECURE_TRAIN_TEST_HOME"]) / "gate" / "bin"


def peers() -> Path:
    """The programs of the peers' environment."""
    return Path(os.environ["SECURE_TRAIN_PEERS"]) / "bin"
