"""The training loop, from the plan to the last checkpoint.

Reads top to bottom: join the other ranks, build or restore, then step, report, validate and save until the
last step or a signal. Promises: an interrupted and resumed run computes what an uninterrupted one would
have; a signal ends it after a whole step with a checkpoint; whatever fails is said once, clearly, and no
rank is left waiting.
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from supplychain.artifact import VerifiedArtifact, canonical_json, write_durably
from trainer import checkpoint, distributed, failure, inputs, optimizer, parallelize, reproducible
from trainer import plan as plans
from trainer.checkpoint import TrainingState
from trainer.data import Batch
from trainer.distributed import Control, World
from trainer.errors import TrainerError
from trainer.metrics import Meter, Sinks
from trainer.model import named_parameters
from trainer.plan import Plan

QUIET = 30.0  # seconds without a line before one is due


class Run:
    """One segment of a training run on one rank: everything that changes from step to step."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.config, self.world = plan, plan.config, world
        self.rows = self.config.rows(world.size)
        self.sinks = Sinks(plan.directory, self.config.train.steps, active=world.leads)
        self.control = Control()
        self.tokenizer = inputs.tokenizer(plan)
        self.loader = inputs.loader(plan, world)
        self.validation = inputs.open_split(plan, inputs.VALIDATION)
        self.model = parallelize.build(self.config, world.size, world.device)
        self.optimizer = optimizer.build(self.model, self.config.optimizer)
        self.step = 0
        self.saved: str | None = None  # name of the newest checkpoint
        self.loss = self.grad_norm = torch.zeros(())  # of the newest step; the loss is this rank's share
        self.reported: str | None = None  # newest loss of all ranks, as text
        if plan.checkpoint is not None:
            self.restore(plan.checkpoint)
        self.meter = Meter(self.config, world.size, world.device)

    def introduce(self) -> None:
        """One line that says what is about to be trained on what."""
        config, world = self.config, self.world
        how = f"compiled with {config.compile_backend}" if config.compile else "not compiled"
        self.sinks.line(
            f"{config.model.flavor}: {config.model.parameters:,} parameters, {config.precision.compute}, "
            f"{how}; {world.size} x {config.device}, {torch.get_num_threads()} threads each; "
            f"{config.tokens_per_step:,} tokens per step, {config.train.steps:,} steps"
        )

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, over all ranks and segments."""
        return self.step * self.config.tokens_per_step

    def train(self) -> None:
        """Steps until the end or a signal; leaves outcome.json."""
        steps, every = self.config.train.steps, self.config.checkpoint.every
        self.introduce()
        stop = self.control.now()
        while self.step < steps and not stop:
            self.optimize()
            stop, asked = self.control.exchange(report=self.meter.silence > QUIET)
            last = self.step == steps
            save = last or bool(stop) or (every > 0 and self.step % every == 0)
            if save or asked or self.report_due():
                self.report()
            if self.validation_due(last):
                self.validate()
            if save:
                self.save()
        self.finish(0 if self.step == steps else stop)

    def optimize(self) -> None:
        """One optimizer step over a global batch, in micro-batches."""
        began = time.monotonic()
        batch = next(self.loader)
        waited = time.monotonic() - began
        optimizer.set_learning_rate(self.optimizer, self.learning_rate(self.step))
        self.loss = self.forward_backward(batch)
        self.grad_norm = optimizer.clip(self.model, float(self.config.optimizer.clip_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.meter.count(self.config.tokens_per_step, waited)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Gradients of this rank's sequences. Each micro-batch's summed loss is divided by the tokens of
        the whole global batch, so gradients add up to those of the mean over all tokens, however the batch
        was divided.
        """
        total = torch.zeros((), device=self.world.device)
        for x, y in inputs.micro_batches(batch, self.rows, self.world.device):
            loss = self.model(x, y) / self.config.tokens_per_step
            loss.backward()
            total += loss.detach()
        return total

    def learning_rate(self, step: int) -> float:
        return optimizer.learning_rate(self.config.optimizer, self.config.train.steps, step)

    def report_due(self) -> bool:
        """At the configured interval, at the first step, and at every tenth of the run."""
        steps = self.config.train.steps
        tenth = self.step * 10 // steps != (self.step - 1) * 10 // steps
        return self.step == 1 or tenth or self.step % self.config.log.every == 0

    def report(self) -> None:
        """Collective. ST-T07 if loss or gradient is not finite: nothing built on it will be saved."""
        loss = distributed.total(self.loss)
        norm = float(self.grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainerError(
                "ST-T07",
                f"loss or gradient is not finite after step {self.step}",
                found=f"loss {loss}, gradient norm {norm}",
                next_step=f"resume from {self.saved or 'the start'} with a lower optimizer.learning_rate",
            )
        self.reported = f"{loss:.6f}"
        rate = self.learning_rate(self.step - 1)
        self.sinks.report(
            self.meter.report(step=self.step, loss=loss, lr=rate, grad_norm=norm, tokens=self.tokens)
        )

    def validation_due(self, last: bool) -> bool:
        every = self.config.train.validate_every
        return every > 0 and (last or self.step % every == 0) and bool(self.validation)

    @torch.no_grad()
    def validate(self) -> None:
        """Mean loss over the first batches of the validation split: the same sequences every time."""
        total, tokens = torch.zeros((), device=self.world.device), 0
        # Not compiled: without gradients a block would be another graph, compiled for a moment's use.
        with torch.compiler.set_stance("force_eager"):
            for batch in inputs.validation(self.plan, self.validation, self.world):
                for x, y in inputs.micro_batches(batch, self.rows, self.world.device):
                    total += self.model(x, y)
                tokens += batch.size * self.config.data.sequence_length
        parallelize.reshard(self.model)
        loss = distributed.total(total) / tokens
        self.sinks.line(
            f"validation after step {self.step}: loss {loss:.4f}  perplexity {math.exp(min(loss, 50)):.1f}"
        )
        self.sinks.record({"step": self.step, "validation_loss": loss})
        self.meter.restart()

    def save(self) -> None:
        """Write a checkpoint of the current step. Collective."""
        began = time.monotonic()
        state = TrainingState(
            step=self.step,
            tokens=self.tokens,
            loss=self.reported or "",
            loader=self.loader.state_dict(),
            plan=self.plan.digest,
            facts=reproducible.facts(),
            world_size=self.world.size,
        )
        documents = {
            "state.json": state.to_json(),
            "config.json": self.config.to_json(),
            "tokenizer.json": self.tokenizer,
        }
        self.sinks.sync()
        path = checkpoint.save(
            self.plan.directory / "checkpoints",
            self.step,
            dict(named_parameters(self.model)),
            optimizer.state_tensors(self.model, self.optimizer),
            documents,
        )
        self.saved = path.name
        self.sinks.line(f"saved {path.name} in {time.monotonic() - began:.1f} s")
        self.meter.restart()

    def restore(self, source: plans.Input) -> None:
        """Weights from a checkpoint; to resume, also the optimizer's state and the place in the data."""
        artifact = VerifiedArtifact.open(source.path, source.manifest)
        model: dict[str, Tensor] = dict(named_parameters(self.model))
        checkpoint.load(artifact, checkpoint.MODEL, model, self.plan.reads)
        if not self.plan.resume:
            self.sinks.line(f"starting from the weights of {source.path.name}")
            return
        checkpoint.load(
            artifact,
            checkpoint.OPTIMIZER,
            optimizer.state_tensors(self.model, self.optimizer),
            self.plan.reads,
        )
        state = TrainingState.from_json(artifact.read_bytes("state.json"))
        self.loader.load_state_dict(dict(state.loader))
        self.step, self.reported, self.saved = state.step, state.loss, source.path.name
        self.sinks.line(f"resuming after step {self.step}, from {source.path.name}")

    def finish(self, stop: int) -> None:
        """Say how the run ended, in outcome.json and in one line."""
        outcome = {
            "status": "stopped" if stop else "completed",
            "step": str(self.step),
            "loss": self.reported,
            "checkpoint": self.saved,
            "signal": signal.Signals(stop).name if stop else None,
        }
        if self.world.leads:
            report = self.plan.directory / failure.REPORT
            report.mkdir(exist_ok=True)
            write_durably(report / "outcome.json", canonical_json(outcome) + b"\n")
        how = f"stopped by {outcome['signal']}" if stop else "completed"
        self.sinks.line(
            f"{how} after step {self.step}: loss {self.reported}, checkpoint {self.saved or 'none'}"
        )

    def close(self) -> None:
        self.loader.close()
        for dataset in self.validation:
            dataset.close()
        self.sinks.close()


def run(plan: Plan) -> None:
    """Train as the plan says, as one of its ranks."""
    _, _, _, local_size = distributed.place()
    reproducible.apply(plan.config, local_size)
    world = distributed.join(plan.config, plan.digest)
    segment = Run(plan, world)
    segment.train()
    segment.close()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """`python -m trainer PLAN --plan-sha256 HEX`, one process of torchrun's."""
    parser = argparse.ArgumentParser(
        prog="trainer", description="Train as a plan says. Started by torchrun, once per rank."
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the plan that the gate wrote")
    parser.add_argument(
        "--plan-sha256", required=True, metavar="HEX", help="its sha256, as the gate computed it"
    )
    options = parser.parse_args(arguments)
    plan = plans.read(options.plan, options.plan_sha256)
    try:
        run(plan)
    except Exception as error:
        failure.leave(error, plan.directory, distributed.place()[0])
    return 0
