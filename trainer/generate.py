"""`python -m trainer generate`: look at what was trained, by sampling text from a signed checkpoint.

One process, no process group. The checkpoint is read through verified reads, whatever world size wrote it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from supplychain.artifact import VerifiedArtifact
from trainer import checkpoint
from trainer.config import Config
from trainer.model import Cache, Llama, named_parameters


def open_model(artifact: VerifiedArtifact, length: int) -> Llama:
    """The checkpoint's model, whole, in float32 on the CPU, for up to `length` tokens."""
    config = Config.from_json(artifact.read_bytes("config.json"))
    with torch.device("meta"):
        model = Llama(config.model, length)
    model.to_empty(device="cpu")
    model.prepare()
    template = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
    checkpoint.load(artifact, checkpoint.MODEL, template)
    return model


@torch.inference_mode()
def sample(model: Llama, prompt: Sequence[int], count: int, temperature: float, seed: int) -> Iterator[int]:
    """Up to `count` tokens after the prompt. Temperature 0 takes the likeliest token each time."""
    generator = torch.Generator().manual_seed(seed)
    caches = [
        Cache(1, model.length, model.shape, device=torch.device("cpu"), dtype=torch.float32)
        for _ in model.layers
    ]
    tokens = torch.tensor([list(prompt)])
    for _ in range(count):
        logits = model(tokens, caches=caches)[0, -1]
        tokens = _choose(logits, temperature, generator).view(1, 1)
        yield int(tokens)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def main(arguments: Sequence[str]) -> int:
    """Print the prompt and what follows it on stdout."""
    parser = argparse.ArgumentParser(prog="trainer generate", description="Sample text from a checkpoint.")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="folder of a checkpoint"
    )
    parser.add_argument(
        "--manifest",
        required=True,
        metavar="HEX",
        help="sha256 of its manifest, from a signature that you trust",
    )
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="how the text begins (default: a new document)"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="how many tokens to add (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 is greedy; higher is wilder (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="same seed, same text (default: 1)")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.temperature < 0:
        parser.error("--tokens must be at least 1, and --temperature not below 0")
    artifact = VerifiedArtifact.open(options.checkpoint, options.manifest)
    tokenizer = Tokenizer.from_buffer(artifact.read_bytes("tokenizer.json"))
    ids = tokenizer.encode(options.prompt).ids if options.prompt else [_document_end(tokenizer)]
    model = open_model(artifact, len(ids) + options.tokens)
    made = list(sample(model, ids, options.tokens, options.temperature, options.seed))
    print(options.prompt + tokenizer.decode(made), flush=True)
    return 0


def _document_end(tokenizer: Tokenizer) -> int:
    """The token that separates documents, after which a text begins; token 0 if there is none by a usual
    name.
    """
    found = (tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|end_of_text|>", "</s>"))
    return next((token for token in found if token is not None), 0)
