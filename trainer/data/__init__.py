"""The data side of the trainer: datasets on disk, their order, and the loader. Needs numpy, never torch."""

from trainer.data.loader import IGNORED, Batch, Loader, validation_batches
from trainer.data.order import ORDER, PACKING, Order, Source, Stage
from trainer.data.shards import Dataset, Description, Shard, Writer

__all__ = [
    "IGNORED",
    "ORDER",
    "PACKING",
    "Batch",
    "Dataset",
    "Description",
    "Loader",
    "Order",
    "Shard",
    "Source",
    "Stage",
    "Writer",
    "validation_batches",
]
