"""A schedule as people write it, in a configuration: stages, each with its mixture.

    web=7, code=3; 5000000: web=5, code=3, math=2; 9000000: math=1

From sample 0 on seven of ten samples come from `web`; from the sample that has the number 5 000 000 in the
whole run, over all ranks, the second mixture holds. Weights are positive integers and count tokens, since
every sample has the same number of them. To change a run on its way, add a stage that begins at or after
the samples it has consumed: what lies before is compared when it resumes, and must be what it was.
"""

from __future__ import annotations

from collections.abc import Mapping

from supplychain.artifact import SecureTrainError
from trainer.data.order import Stage


def parse_schedule(text: str, digests: Mapping[str, str]) -> list[Stage] | None:
    """Stages from text; `digests` gives the manifest of each dataset by its name. None for an empty text:
    one stage in which each dataset counts by its size. ST-D08 for anything else that is no schedule.
    """
    if not text.strip():
        return None
    stages = []
    for number, part in enumerate(text.split(";")):
        before, colon, after = part.rpartition(":")
        start = _number(before, "a stage begins at the number of a sample") if colon or number else 0
        weights: dict[str, int] = {}
        for item in after.split(","):
            name, equals, weight = (piece.strip() for piece in item.partition("="))
            if name not in digests:
                raise _refused("the schedule names a dataset that the run does not have", name, digests)
            if digests[name] in weights:
                raise _refused("the schedule names a dataset twice in one stage", name)
            weights[digests[name]] = _number(weight if equals else "", f"the weight of {name!r} is a number")
        stages.append(Stage(start, weights))
    return stages


def _number(text: str, what: str) -> int:
    text = text.strip().replace("_", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise _refused(what, text)
    return int(text)


def _refused(what: str, found: str, known: Mapping[str, str] | None = None) -> SecureTrainError:
    return SecureTrainError(
        "ST-D08",
        what,
        expected=", ".join(known) if known else "[START:] NAME=WEIGHT, ...; START: NAME=WEIGHT, ...",
        found=repr(found[:80]),
        next_step="correct the data schedule of the run",
    )
