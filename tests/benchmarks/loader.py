"""The stateful loader beside others, on the same tokens, packed (8, 4096): CPU time for each token.

Ours verifies what it reads where the case says so; no peer does. Cases compare like with like: shuffled
everywhere, and rows that were aligned when the data was prepared. `numpy memmap` with a permutation is the
floor of everybody who hashes nothing. A peer that is not installed is left out and named.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from supplychain.artifact import build_manifest
from tests.benchmarks._loading import LENGTH, ROWS, SYSTEMS
from tests.benchmarks._report import OURS, Report, options
from trainer.data import Writer
from trainer.data.pack import pack_folder
from trainer.data.shards import TOKENIZER

VOCABULARY = 128_256
PEERS = [name for name in SYSTEMS if "," not in name]
ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=40_000_000, metavar="N", help="tokens (default 40 M)")
    parser.add_argument(
        "--batches", type=int, default=400, metavar="N", help="batches of a run (default 400)"
    )
    chosen = parser.parse_args()
    report = Report("reading training data: CPU time, and what our own thread notices")
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name:
        folder = Path(name)
        write(folder, chosen.tokens // (LENGTH * ROWS) * LENGTH * ROWS)
        found = _measure(folder, chosen.batches, chosen.repeat)
    _note(report, found)
    report.finish(chosen.json)


def write(folder: Path, count: int) -> None:
    """The tokens, raw for the peers, and as two datasets of ours: documents as they come, and in rows."""
    data = np.random.default_rng(1).integers(0, VOCABULARY, count, np.uint32)
    data.tofile(folder / "tokens.bin")
    digest = hashlib.sha256(b"{}").hexdigest()
    for kind in ("concat", "rows"):
        root = folder / kind
        root.mkdir()
        (root / TOKENIZER).write_bytes(b"{}")
        writer = Writer(root, vocab_size=VOCABULARY, tokenizer=digest, shard_tokens=-(-count // 8))
        writer.add("train", data, np.full(count // LENGTH, LENGTH))
        description = writer.finish()
        if kind == "rows":
            pack_folder(root, description, LENGTH)
        (folder / f"{kind}.digest").write_text(build_manifest(root, "dataset").digest)


def _measure(folder: Path, batches: int, repeat: int) -> dict[str, dict[str, float]]:
    """Medians of each system, taken in turn; a system that fails at its first run is left out."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    for turn in range(repeat + 1):  # the first warms the caches, and writes the peers' own formats
        for name in list(runs):
            done = subprocess.run(
                [_python(name), "-m", "tests.benchmarks._loading", name, str(folder), str(batches)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=600,
            )
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
                print(f"  left out: {name} ({reason:.160})", file=sys.stderr, flush=True)
                del runs[name]
            elif turn:
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
        print(f"  round {turn} of {repeat}", file=sys.stderr, flush=True)
    return {
        name: {metric: statistics.median(run[metric] for run in found) for metric in found[0]}
        for name, found in runs.items()
        if found
    }


def _python(system: str) -> str:
    """The peers' environment for all, if there is one: the same numpy then."""
    peers = os.environ.get("SECURE_TRAIN_PEERS")
    return f"{peers}/bin/python" if peers else sys.executable


def _note(report: Report, found: dict[str, dict[str, float]]) -> None:
    for name in [name for name in found if "," in name]:
        mode, kind = name.split(", ")
        case = f"{'unverified' if mode == 'off' else f'verified {mode}'}, {kind}"
        for system in [name, *(peer for peer in PEERS if peer in found)]:
            per_token = found[system]["batch"] / (ROWS * LENGTH)
            report.note(case, OURS if system == name else system, "CPU", per_token * 1e9, "ns/token")
            if system == name:
                report.note(case, OURS, "speed", 1e-6 / per_token, "M tokens/CPU-s")
    for name, metrics in found.items():
        for metric in ("first batch", "resume", "main thread"):
            if metric in metrics:
                report.note(metric, name, "CPU", metrics[metric] * 1e3, "ms")


if __name__ == "__main__":
    main()
