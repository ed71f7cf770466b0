"""The trainer's configuration: typed, documented, strict.

Owns every setting, its default (good for a real run), the presets, and how a file and `--set` become one
resolved document. Promises: an unknown key is refused with the nearest name, nothing is left "auto", the
result is canonical JSON without floats and is parsed back exactly. Imports neither torch nor anything
heavy: the gate runs it, as a process, before any run is allowed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from supplychain.artifact import canonical_json, parse_json
from trainer import fields
from trainer.errors import TrainerError
from trainer.fields import option, section
from trainer.flavors import FLAVORS, Shape

# ruff: noqa: RUF009 - `option` and `section` are dataclasses.field with a fixed form of metadata


@dataclass(frozen=True)
class DataConfig:
    """What a step reads. Which datasets, by digest, stands in the plan."""

    sequence_length: int = option(8192, "tokens that one sequence predicts", low=1)
    weights: str = option(
        "", "mixture weights as name=integer, comma-separated; empty is by number of tokens"
    )
    prefetch: int = option(2, "global batches read ahead by a thread", low=0, high=64)


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch and checks of a run."""

    steps: int = option(10000, "optimizer steps of the whole run", low=1)
    global_batch: int = option(512, "sequences of one optimizer step, over all ranks", low=1)
    micro_batch: int = option(
        1,
        "sequences of one forward pass on one rank, the rest is accumulation; 0 is a rank's whole share",
        low=0,
    )
    loss_chunk: int = option(
        2048, "tokens whose logits exist at one time; a smaller number trades speed for memory", low=1
    )
    validate_every: int = option(0, "steps between validation losses; 0 is never", low=0)
    validate_batches: int = option(10, "global batches of one validation", low=1)
    timeout: int = option(600, "seconds after which a rank that waits for its peers gives up", low=10)
    threads: int = option(
        0, "CPU threads of one process; 0 shares the node's cores among its processes", low=0
    )
    deterministic: bool = option(True, "refuse operations whose result may differ from run to run")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule and clipping."""

    learning_rate: Decimal = option(Decimal("0.0003"), "peak learning rate", above=0)
    beta1: Decimal = option(Decimal("0.9"), "decay of the first moment", low=0, high=1)
    beta2: Decimal = option(Decimal("0.95"), "decay of the second moment", low=0, high=1)
    epsilon: Decimal = option(Decimal("0.00000001"), "added to the root of the second moment", above=0)
    weight_decay: Decimal = option(Decimal("0.1"), "decoupled decay of matrices; norms never decay", low=0)
    decay_embeddings: bool = option(True, "let embedding and head decay as well")
    clip_norm: Decimal = option(Decimal(1), "largest norm of the whole gradient; 0 does not clip", low=0)
    implementation: str = option(
        "foreach",
        "AdamW kernels; they differ in the last bits, and only foreach ignores where a shard is cut",
        choices=("foreach", "fused", "for-loop"),
    )
    schedule: str = option(
        "cosine", "shape of the decay after the warm-up", choices=("cosine", "linear", "wsd")
    )
    warmup_steps: int = option(500, "steps of linear warm-up", low=0)
    decay_steps: int = option(1000, "wsd only: last steps, in which the rate falls linearly", low=0)
    final_ratio: Decimal = option(
        Decimal("0.1"), "learning rate at the end, as a part of the peak", low=0, high=1
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks divide the work: dp_replicate x dp_shard must be the number of processes."""

    dp_replicate: int = option(1, "groups that hold a full copy each (HSDP when above 1)", low=1)
    dp_shard: int = option(0, "ranks over which one copy is sharded (FSDP2); 0 is all that remain", low=0)
    activation_checkpoint: str = option(
        "none",
        "what the backward pass recomputes: nothing, whole blocks, or all but every second matrix product",
        choices=("none", "selective", "full"),
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Master weights and optimizer state are always float32."""

    compute: str = option(
        "auto",
        "type of weights and activations in forward and backward",
        choices=("float32", "bfloat16"),
        auto=True,
    )
    reduce: str = option(
        "float32", "type in which gradients are summed over ranks", choices=("float32", "bfloat16")
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run's state is written."""

    every: int = option(
        500, "steps between checkpoints; one is always written at the end; 0 is only then", low=0
    )


@dataclass(frozen=True)
class LogConfig:
    """What is reported."""

    every: int = option(10, "steps between progress lines and metrics", low=1)


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    seed: int = option(1234, "seed of initialisation and data order", low=0, high=2**63 - 1, text=True)
    device: str = option("auto", "where tensors live", choices=("cpu", "cuda"), auto=True)
    compile: bool = option(True, "torch.compile of each transformer block", auto=True)
    compile_backend: str = option("inductor", "what torch.compile calls", choices=("inductor", "aot_eager"))
    model: Shape = section(Shape, "shape of the model")
    data: DataConfig = section(DataConfig, "sequences and mixture")
    train: TrainConfig = section(TrainConfig, "length, batch and checks")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW, schedule, clipping")
    parallel: ParallelConfig = section(ParallelConfig, "device mesh and recomputation")
    precision: PrecisionConfig = section(PrecisionConfig, "number formats")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "when to save")
    log: LogConfig = section(LogConfig, "what to report")

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens of one optimizer step, over all ranks. Sequences are packed, so every one
        counts.
        """
        return self.train.global_batch * self.data.sequence_length

    def to_json(self) -> bytes:
        """Canonical JSON, without floats."""
        return canonical_json(fields.to_document(self))

    @staticmethod
    def from_document(document: object) -> Config:
        """A resolved configuration, as a plan or a checkpoint holds it: every key present, nothing "auto"."""
        config = fields.from_document(Config, document, complete=True)
        config.check()
        return config

    @staticmethod
    def from_json(data: bytes) -> Config:
        return Config.from_document(parse_json(data, what="the configuration"))

    def check(self) -> None:
        """Refuse settings that contradict each other. ST-T02."""
        model = self.model
        if model.flavor not in FLAVORS:
            raise fields.unknown("ST-T03", "model flavor", model.flavor, FLAVORS, where="model.flavor")
        _require(
            model.dim % model.heads == 0, "model.heads", f"a divisor of model.dim = {model.dim}", model.heads
        )
        _require(model.head_dim % 2 == 0, "model.heads", "heads of even size (rotary pairs)", model.head_dim)
        _require(
            model.heads % model.kv_heads == 0,
            "model.kv_heads",
            f"a divisor of model.heads = {model.heads}",
            model.kv_heads,
        )

    def mesh(self, world_size: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) for this many processes; ST-T04 if it does not come out even."""
        replicate, shard = self.parallel.dp_replicate, self.parallel.dp_shard
        shard = shard or max(world_size // replicate, 1)
        if replicate * shard != world_size:
            raise TrainerError(
                "ST-T04",
                f"the mesh dp_replicate x dp_shard = {replicate} x {shard} does not make up the {world_size} "
                "processes of this run",
                where="parallel",
                expected=str(world_size),
                found=str(replicate * shard),
            )
        self.rows(world_size)
        return replicate, shard

    def rows(self, world_size: int) -> int:
        """Sequences of one micro-batch on one of this many ranks; ST-T04 if the global batch is not a
        multiple.
        """
        batch = self.train.global_batch
        rows = self.train.micro_batch or max(batch // world_size, 1)
        if batch % (world_size * rows):
            raise TrainerError(
                "ST-T04",
                f"the global batch of {batch} sequences cannot be divided over {world_size} processes in "
                f"micro-batches of {rows}",
                where="train.global_batch",
                expected=f"a multiple of {world_size * rows}",
                found=str(batch),
            )
        return rows


def _require(holds: bool, where: str, expected: str, found: object) -> None:
    if not holds:
        raise TrainerError(
            "ST-T02",
            f"{where} does not fit the other settings",
            where=where,
            expected=expected,
            found=str(found),
        )


PRESETS: dict[str, dict[str, Any]] = {
    # A visible training run in about two minutes on two cores, compilation included.
    "quickstart": {
        "model": {"flavor": "quickstart"},
        "data": {"sequence_length": 128},
        "train": {
            "steps": 600,
            "global_batch": 8,
            "micro_batch": 0,
            "loss_chunk": 4096,
            "validate_every": 200,
            "validate_batches": 16,
        },
        "optimizer": {"learning_rate": "0.006", "warmup_steps": 40, "implementation": "fused"},
        "checkpoint": {"every": 200},
        "log": {"every": 20},
    },
}


def resolve(
    *,
    preset: str | None = None,
    file: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    device: str | None = None,
    vocab_size: int | None = None,
) -> tuple[Config, list[str]]:
    """The configuration from its layers (defaults, flavor, preset, file, settings: later ones win), and the
    reasons of what was decided automatically.
    """
    if preset is not None and preset not in PRESETS:
        raise fields.unknown("ST-T03", "preset", preset, PRESETS, where="--preset")
    layers = [PRESETS.get(preset or "", {}), file or {}, *(_parse_setting(item) for item in settings)]
    chosen: dict[str, Any] = {}
    for layer in layers:
        chosen = _overlay(chosen, layer)
    model = chosen.get("model", {})
    flavor = model.get("flavor", Shape().flavor) if isinstance(model, dict) else Shape().flavor
    if flavor not in FLAVORS:
        raise fields.unknown("ST-T03", "model flavor", str(flavor), FLAVORS, where="model.flavor")
    base = {"model": fields.to_document(FLAVORS[flavor])}
    if vocab_size is not None:
        base["model"]["vocab_size"] = vocab_size
    chosen = _overlay(base, chosen)
    if device is not None:
        chosen["device"] = device
    reasons = _decide(chosen)
    config = fields.from_document(Config, chosen)
    config.check()
    return config, reasons


def _decide(chosen: dict[str, Any]) -> list[str]:
    """Replace every "auto" by a value; returns why."""
    reasons = []
    if chosen.get("device", "auto") == "auto":
        # Without torch: a driver's control device is there exactly where CUDA can be.
        found = Path("/dev/nvidiactl").exists()
        chosen["device"] = "cuda" if found else "cpu"
        reasons.append(f"device: {chosen['device']} ({'an' if found else 'no'} NVIDIA driver was found)")
    if chosen.get("compile", "auto") == "auto":
        compiler = _compiler()
        chosen["compile"] = chosen["device"] == "cuda" or compiler is not None
        why = f"C++ compiler {compiler}" if compiler else "no C++ compiler was found"
        reasons.append(
            f"compile: {str(chosen['compile']).lower()} ({'Triton' if chosen['device'] == 'cuda' else why})"
        )
    precision = chosen.setdefault("precision", {})
    if isinstance(precision, dict) and precision.get("compute", "auto") == "auto":
        precision["compute"] = "bfloat16" if chosen["device"] == "cuda" else "float32"
        reasons.append(f"precision.compute: {precision['compute']} (device {chosen['device']})")
    return reasons


def _compiler() -> str | None:
    """The C++ compiler that torch's inductor would call, or None."""
    return next(
        (
            found
            for name in (os.environ.get("CXX", ""), "g++", "clang++")
            if name and (found := shutil.which(name))
        ),
        None,
    )


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _overlay(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def _parse_setting(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested table; c is read as TOML, and as plain text where it is none."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise TrainerError("ST-T02", "a setting has the form section.key=value", where=f"--set {text}")
    try:
        parsed: Any = tomllib.loads(f"value = {value}", parse_float=Decimal)["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for key in reversed(keys):
        parsed = {key: parsed}
    return dict(parsed)


def read_file(path: Path) -> dict[str, Any]:
    """A TOML file; decimals exact."""
    try:
        return tomllib.loads(path.read_text("utf-8"), parse_float=Decimal)
    except OSError as error:
        raise TrainerError(
            "ST-T02", f"the configuration file cannot be read: {error.strerror}", where=str(path)
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainerError(
            "ST-T02", f"the configuration file is not TOML: {error}", where=str(path)
        ) from None


def main(arguments: Sequence[str]) -> int:
    """`python -m trainer config`: print the resolved configuration on stdout, decisions on stderr."""
    parser = argparse.ArgumentParser(
        prog="trainer config",
        description="Resolve a training configuration and print it as canonical JSON. Later layers win: "
        "defaults, the model flavor, --preset, --file, --set.",
    )
    parser.add_argument("--preset", metavar="NAME", help=f"ready configuration: {', '.join(PRESETS)}")
    parser.add_argument("--file", type=Path, metavar="TOML", help="configuration file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="settings",
        help="one setting; may be repeated",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="where to train (default: what the machine has)"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="vocabulary of the tokenizer, unless the model section sets one",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="also check that mesh and batch fit this many processes"
    )
    parser.add_argument(
        "--fields", action="store_true", help="list every key with its default and meaning, and stop"
    )
    options = parser.parse_args(arguments)
    if options.fields:
        for name, default, doc in fields.describe(Config):
            print(f"{name:32} {default:12} {doc}")
        return 0
    config, reasons = resolve(
        preset=options.preset,
        file=read_file(options.file) if options.file else None,
        settings=options.settings,
        device=options.device,
        vocab_size=options.vocab_size,
    )
    if options.world_size is not None:
        config.mesh(options.world_size)
    for reason in reasons:
        print(reason, file=sys.stderr)
    sys.stdout.buffer.write(config.to_json() + b"\n")
    return 0
