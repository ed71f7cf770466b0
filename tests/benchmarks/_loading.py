"""One loader, measured: `python _loading.py SYSTEM FOLDER BATCHES` prints CPU seconds as JSON.

Runs in the peers' environment, so it imports each system where it is used. Every system gives batches of
ROWS x LENGTH token ids and labels as int64 (or what it makes), from the same tokens, shuffled.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, SEED = 8, 4096, 1
Loading = Iterator[Any]


def peer(module: str) -> Any:
    return importlib.import_module(module)


def tokens(folder: Path) -> Any:
    return np.memmap(folder / "tokens.bin", np.uint32, "r")


# --- ours ----------------------------------------------------------------------------------------------


def ours(verify: str, packing: str, **options: Any) -> Callable[[Path], Loading]:
    def made(folder: Path) -> Loading:
        from trainer.data import Dataset, Loader, Window

        root = folder / packing
        data = Dataset.open(root, (folder / f"{packing}.digest").read_text(), verify=verify)  # type: ignore[arg-type]  # one of three
        if packing == "rows":
            options["window"] = Window(4, 1)
        given = {"seq_len": LENGTH, "global_batch": ROWS, "seed": SEED, "packing": packing, "threads": 0}
        return Loader([data], **(given | options))  # type: ignore[arg-type]  # what fits

    return made


# --- peers ---------------------------------------------------------------------------------------------


class Mapped:
    """A map-style dataset over the raw file, as most of them want it."""

    def __init__(self, folder: Path) -> None:
        self._tokens = tokens(folder)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // LENGTH

    def raw(self, index: int) -> Any:
        return self._tokens[index * LENGTH : index * LENGTH + LENGTH + 1]

    def __getitem__(self, index: int) -> Any:
        return self.raw(int(index)).astype(np.int64)


def memmap(folder: Path) -> Loading:
    data = Mapped(folder)
    order = np.random.default_rng(SEED).permutation(len(data))
    for first in range(0, len(order) - ROWS, ROWS):
        batch = np.empty((ROWS, LENGTH + 1), np.int64)
        for row, index in zip(batch, order[first : first + ROWS].tolist(), strict=True):
            row[:] = data.raw(index)
        yield batch


def torchdata(folder: Path) -> Loading:
    library = peer("torchdata.stateful_dataloader")
    return iter(library.StatefulDataLoader(Mapped(folder), batch_size=ROWS, shuffle=True, num_workers=0))


def grain(folder: Path) -> Loading:
    library = peer("grain.python")
    options = library.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    source = library.MapDataset.source(Mapped(folder)).shuffle(seed=SEED).batch(ROWS)
    return iter(source.to_iter_dataset(options))


def _part(folder: str, first: int) -> Iterator[Any]:
    yield peer("torch").from_numpy(tokens(Path(folder))[first : first + (1 << 20)].astype(np.int32))


def litdata(folder: Path) -> Loading:
    library = peer("litdata")
    place = folder / "litdata"
    if not place.exists():
        parts = range(0, len(tokens(folder)), 1 << 20)
        library.optimize(
            fn=functools.partial(_part, str(folder)),
            inputs=list(parts),
            output_dir=str(place),
            chunk_bytes="32MB",
            num_workers=1,
            item_loader=library.TokensLoader(),
        )
    source = library.StreamingDataset(
        str(place), item_loader=library.TokensLoader(block_size=LENGTH + 1), shuffle=True, drop_last=True
    )
    return iter(library.StreamingDataLoader(source, batch_size=ROWS, num_workers=0))


def mosaic(folder: Path) -> Loading:
    streaming, torch = peer("streaming"), peer("torch")
    place = folder / "mosaic"
    if not place.exists():
        data = Mapped(folder)
        with streaming.MDSWriter(out=str(place), columns={"tokens": "ndarray:uint32"}) as writer:
            for index in range(len(data)):
                writer.write({"tokens": data[index].astype(np.uint32)})
    source = streaming.StreamingDataset(local=str(place), shuffle=True, batch_size=ROWS, shuffle_seed=SEED)
    return iter(
        torch.utils.data.DataLoader(source, batch_size=ROWS, collate_fn=lambda rows: np.stack(
            [row["tokens"].astype(np.int64) for row in rows]
        ))
    )  # fmt: skip


def olmo(folder: Path) -> Loading:
    library = peer("olmo_core.data")
    dataset = library.NumpyFSLDataset(
        str(folder / "tokens.bin"), sequence_length=LENGTH, pad_token_id=0, eos_token_id=0,
        vocab_size=128_256, dtype=np.uint32,
    )  # fmt: skip
    dataset.prepare()
    loader = peer("olmo_core.data.data_loader").NumpyFSLDataLoader(
        dataset, collator=peer("olmo_core.data.collator").DataCollator(pad_token_id=0),
        global_batch_size=ROWS * LENGTH, work_dir=str(folder / "olmo"), seed=SEED,
    )  # fmt: skip
    loader.reshuffle(epoch=1)
    return iter(loader)


def ibm(folder: Path) -> Loading:
    """From a checkout of fms-fsdp that SECURE_TRAIN_FMS_FSDP names; 64 logical shards, a buffer of 1000."""
    torch = peer("torch")
    sys.path.insert(0, os.environ["SECURE_TRAIN_FMS_FSDP"])
    library = peer("fms_fsdp.utils.dataset_utils")
    place = folder / "ibm"
    if not place.exists():
        _write_arrow(folder, place)
    data: Any = library.StreamingDocDataset(
        str(place / "documents"), 0, 1, library.ArrowHandler(), -1, min_length=3, seed=SEED
    )
    data = library.ScalableShardDataset(data, -1, n_logical_shards=64)
    data = library.BufferDataset(data, LENGTH + 1, pack_hard=True)
    data = library.PreprocessDataset(library.PreloadBufferDataset(data, 1000), torch.IntTensor)
    return iter(torch.utils.data.DataLoader(data, batch_size=ROWS))


def _write_arrow(folder: Path, place: Path) -> None:
    pyarrow = peer("pyarrow")
    (place / "documents").mkdir(parents=True)
    (place / "meta").mkdir()
    data, document = tokens(folder), 1000
    schema = pyarrow.schema([("tokens", pyarrow.uint32())])
    count = len(data) // document
    with pyarrow.ipc.new_file(str(place / "documents" / "00000.arrow"), schema) as writer:
        for number in range(count):
            column = pyarrow.array(data[number * document : (number + 1) * document])
            writer.write_batch(pyarrow.record_batch([column], schema=schema))
    lines = f"dataset/filename,documents,tokens\n/documents/00000.arrow,{count},{count * document}\n"
    (place / "meta" / "counts.csv").write_text(lines)


SYSTEMS: dict[str, Callable[[Path], Loading]] = {
    "always, random": ours("always", "concat"),
    "once, random": ours("once", "concat"),
    "off, random": ours("off", "concat"),
    "always, rows": ours("always", "rows"),
    "off, rows": ours("off", "rows"),
    "numpy memmap": memmap,
    "torchdata": torchdata,
    "grain": grain,
    "litdata": litdata,
    "mosaicml-streaming": mosaic,
    "ai2-olmo-core": olmo,
    "fms-fsdp": ibm,
}
HIDDEN: dict[str, Callable[[Path], Loading]] = {  # with a thread that reads ahead
    "always, random": ours("always", "concat", threads=1, prefetch=4),
    "off, random": ours("off", "concat", threads=1, prefetch=4),
}


def main(system: str, folder: Path, batches: int) -> dict[str, float]:
    begun = time.process_time()
    loading: Any = iter(SYSTEMS[system](folder))
    next(loading)
    found = {"first batch": time.process_time() - begun}
    for _ in range(20):
        next(loading)
    begun = time.process_time()
    for _ in range(batches):
        next(loading)
    found["batch"] = (time.process_time() - begun) / batches
    if hasattr(loading, "load_state_dict"):
        begun = time.process_time()
        again: Any = SYSTEMS[system](folder)
        again.load_state_dict(loading.state_dict())
        next(again)
        found["resume"] = time.process_time() - begun
    if system in HIDDEN:
        found["main thread"] = _main_thread(iter(HIDDEN[system](folder)), batches)
    return found


def _main_thread(loading: Loading, batches: int) -> float:
    """What the training thread itself spends on a batch while another one reads ahead."""
    for _ in range(10):
        next(loading)
    begun = time.thread_time()
    for _ in range(batches):
        next(loading)
    return (time.thread_time() - begun) / batches


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
