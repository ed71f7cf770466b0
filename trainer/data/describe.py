"""What a dataset holds: `python -m trainer.data.describe DIR --manifest HEX`. Counts, lengths of documents, a
few of them as text, and what they were made from; all through verified reads. stdout: one JSON object.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from supplychain.artifact import SecureTrainError, VerifiedArtifact, parse_json
from trainer.data.command import run_command
from trainer.data.dataset import Dataset
from trainer.data.order import permute
from trainer.data.shards import DESCRIPTION, PREPARATION, TOKENIZER, Description

SHARDS = 64  # whose documents are counted by length, at most
SHOWN = 300  # tokens of a sample


def describe(root: Path, digest: str, *, samples: int = 3, seed: int = 0) -> dict[str, object]:
    """`samples` documents of each split are chosen by `seed`."""
    artifact = VerifiedArtifact.open(root, digest)
    names = {file.path for file in artifact.manifest.files}
    made = parse_json(artifact.read_bytes(PREPARATION), what=PREPARATION) if PREPARATION in names else {}
    tokenizer = _tokenizer(artifact.read_bytes(TOKENIZER)) if TOKENIZER in names else None
    splits: dict[str, object] = {}
    description = Description.parse(artifact.read_bytes(DESCRIPTION))
    for split in dict.fromkeys(shard.split for shard in description.shards):
        with Dataset(artifact, split=split) as data:
            splits[split] = _split(data, tokenizer, samples, seed)
    return {
        "dtype": description.dtype,
        "vocab_size": description.vocab_size,
        "tokenizer": description.tokenizer,
        "tokens": description.tokens,
        "documents": description.documents,
        "packings": [packed.seq_len for packed in description.packings],
        "splits": splits,
        "sources": made.get("sources", []),
        "parameters": made.get("parameters", {}),
    }


def _tokenizer(data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception
        raise SecureTrainError("ST-D04", "the tokenizer cannot be loaded", found=f"{error!s:.200}") from None


def _split(data: Dataset, tokenizer: Tokenizer | None, samples: int, seed: int) -> dict[str, object]:
    counted = data.shards[:SHARDS]
    ends = {shard.name: data.shard_ends(shard).astype(np.int64) for shard in counted}
    lengths = np.concatenate([np.diff(each, prepend=0) for each in ends.values()])
    return {
        "tokens": data.tokens,
        "documents": sum(shard.documents for shard in data.shards),
        "shards": len(data.shards),
        "lengths": {
            "shards": len(counted),
            "least": int(lengths.min()),
            "median": int(np.median(lengths)),
            "mean": int(lengths.mean()),
            "most": int(lengths.max()),
            "histogram": histogram(lengths),
        },
        "samples": [
            _sample(data, ends, number, tokenizer) for number in _chosen(len(lengths), samples, seed)
        ],
    }


def histogram(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> list[dict[str, int]]:
    """Documents of up to 1, 2, 4, 8, ... tokens."""
    bits = np.ceil(np.log2(lengths)).astype(int)
    counts = np.bincount(bits)
    return [{"up_to": 1 << bit, "documents": int(count)} for bit, count in enumerate(counts) if count]


def _chosen(documents: int, samples: int, seed: int) -> list[int]:
    places = np.arange(min(samples, documents))
    return sorted(permute(places, documents, seed, "describe", 0, "samples").tolist())


def _sample(
    data: Dataset, ends: dict[str, Any], number: int, tokenizer: Tokenizer | None
) -> dict[str, object]:
    after = np.cumsum([len(each) for each in ends.values()])
    place = int(np.searchsorted(after, number, side="right"))
    name = list(ends)[place]
    number -= int(after[place - 1]) if place else 0
    begin = int(ends[name][number - 1]) if number else 0
    length = int(ends[name][number]) - begin
    tokens = data.read(data.shard_start(place) + begin, min(length, SHOWN)).tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer else None
    return {"shard": name, "document": number, "tokens": length, "text": text, "ids": tokens[:16]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data.describe", description="What a dataset holds."
    )
    take = parser.add_argument
    take("folder", type=Path, metavar="DIR")
    take("--manifest", required=True, metavar="HEX", help="sha256 of the manifest")
    take("--samples", type=int, default=3, metavar="N", help="documents of each split to show (default 3)")
    take("--seed", type=int, default=0, metavar="N", help="decides which")
    take("--failure", type=Path, metavar="FILE", help="on an error, write it here as JSON instead")
    given = parser.parse_args(arguments)
    return run_command(
        lambda: describe(given.folder, given.manifest, samples=given.samples, seed=given.seed), given.failure
    )


if __name__ == "__main__":
    raise SystemExit(main())
