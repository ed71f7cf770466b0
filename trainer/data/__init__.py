"""The data side of the trainer: datasets on disk, their order, and the loader. Needs numpy, never torch."""

from trainer.data.batch import IGNORED, Batch
from trainer.data.dataset import Dataset
from trainer.data.loader import Loader, validation_batches
from trainer.data.order import ORDER, PACKING, ROWS, Order, Source, Stage, Window
from trainer.data.schedule import parse_schedule
from trainer.data.shards import Description, Shard, Writer
from trainer.data.transform import Transform

__all__ = [
    "IGNORED",
    "ORDER",
    "PACKING",
    "ROWS",
    "Batch",
    "Dataset",
    "Description",
    "Loader",
    "Order",
    "Shard",
    "Source",
    "Stage",
    "Transform",
    "Window",
    "Writer",
    "parse_schedule",
    "validation_batches",
]
