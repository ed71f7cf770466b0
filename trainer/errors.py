"""The trainer's errors: code, exit code and the text of `secure-train explain CODE`.

Same shape as the gate's errors, so that one renderer serves both; a separate catalogue, because the trainer
runs in its own environment. Standard library only and free of imports of ours, so that the gate can show
these texts without torch.
"""

from __future__ import annotations

from typing import NamedTuple

USAGE = 2
REFUSED_INTEGRITY = 3
FAILED = 10
PEER_FAILED = 11


class Code(NamedTuple):
    """One row of the catalogue."""

    exit_code: int
    title: str
    text: str


CODES: dict[str, Code] = {
    "ST-T01": Code(
        USAGE,
        "unknown configuration key",
        "A key of the configuration does not exist; the message names the nearest one. A key that is "
        "silently ignored would train with a default that nobody chose. `python -m trainer config "
        "--fields` lists all.",
    ),
    "ST-T02": Code(
        USAGE,
        "bad configuration value",
        "A value has the wrong type, is outside its range, or contradicts another one.",
    ),
    "ST-T03": Code(
        USAGE,
        "unknown name",
        "A preset or a model flavor of this name does not exist; the message names the nearest one.",
    ),
    "ST-T04": Code(
        USAGE,
        "configuration does not fit the processes",
        "The device mesh or the global batch cannot be divided over the processes that were started.",
    ),
    "ST-T05": Code(
        REFUSED_INTEGRITY,
        "ranks have different plans",
        "A process was started with another plan than its peers. Nothing was trained: processes that "
        "disagree about the input would produce a result that no plan describes.",
    ),
    "ST-T06": Code(
        USAGE,
        "plan malformed",
        "The plan has the right digest and is not a plan that this trainer understands: the gate and "
        "the trainer are probably of different versions.",
    ),
    "ST-T07": Code(
        FAILED,
        "loss is not finite",
        "The loss or the gradient norm became infinite or NaN. Training stopped before saving, so the "
        "newest checkpoint is still good. Usual remedies: a lower learning rate, a longer warm-up, "
        "clipping.",
    ),
    "ST-T08": Code(
        PEER_FAILED,
        "another rank stopped",
        "This process was healthy and lost a peer. The cause is in the peer's own message, or, if the "
        "peer was killed, in the system's log (out of memory is the usual one).",
    ),
    "ST-T09": Code(
        USAGE,
        "device not available",
        "The plan asks for a device that this process does not have.",
    ),
    "ST-T10": Code(
        USAGE,
        "data does not fit the model",
        "The tokens of a dataset were made with a larger vocabulary than the model's, or with another "
        "tokenizer than the plan names.",
    ),
    "ST-T11": Code(
        FAILED,
        "compilation failed",
        "torch.compile could not generate or build the code for a block. Without a working C++ compiler "
        "(CPU) or Triton (GPU), train with `--set compile=false`.",
    ),
    "ST-T12": Code(
        FAILED,
        "out of GPU memory",
        "A tensor did not fit into the GPU's memory. Smaller micro-batches, recomputation of "
        "activations, more ranks per copy and smaller loss chunks each save memory.",
    ),
    "ST-C01": Code(
        REFUSED_INTEGRITY,
        "tensor file malformed",
        "A safetensors file of a checkpoint has a header that no honest writer makes: duplicate names, "
        "ranges that overlap or leave the file, gaps, or shapes that do not match their bytes.",
    ),
    "ST-C02": Code(
        USAGE,
        "checkpoint of another model",
        "The checkpoint's tensors are not exactly those of the model and optimizer: names are missing "
        "or unknown, or a shape or type differs. A partial load would train a half-initialised model.",
    ),
    "ST-C03": Code(
        FAILED,
        "checkpoint not written",
        "A checkpoint could not be written on at least one rank. All ranks stopped; nothing "
        "half-written stands under a final name, and the previous checkpoint is intact.",
    ),
    "ST-C04": Code(
        USAGE,
        "checkpoint exists",
        "A signed checkpoint of this step is already in the run folder, and signed checkpoints are "
        "never replaced.",
    ),
    "ST-C05": Code(
        REFUSED_INTEGRITY,
        "checkpoint state malformed",
        "The checkpoint's state.json is not what this trainer writes.",
    ),
}


class TrainerError(Exception):
    """What a person or a program needs to act on a failure; `code` is a key of `CODES`.

    `what` is one sentence; `where` names the file, key or rank; `expected` and `found` are short texts;
    `next_step` is a command or an action.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step

    @property
    def exit_code(self) -> int:
        return CODES[self.code].exit_code

    def as_dict(self) -> dict[str, str | int | None]:
        return {
            "code": self.code,
            "title": CODES[self.code].title,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "next_step": self.next_step,
            "exit_code": self.exit_code,
        }

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        for label, value in (
            ("where", self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("next", self.next_step),
        ):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)
