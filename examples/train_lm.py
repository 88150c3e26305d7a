"""A language model of Python's own source, trained with HSDP: FSDP2 inside a replica group, fault tolerance across.

    tft-lighthouse --min_replicas 1                                                 # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 python train_lm.py     # shell 2
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=1 python train_lm.py     # shell 3

Or, with two processes a replica group, `torchrun --standalone --nproc_per_node=2 --max_restarts=10 train_lm.py` in
shells 2 and 3. Kill what you like, and start it again; torchrun does the latter itself.

What a step trains on depends on the seed and the committed step alone, and those who take part in the step divide it
among themselves. So its gradient is the same whoever is missing, a step that failed is done again, and a run in which
groups died and came back ends with the loss of a run in which none did.
"""

import argparse
import logging
import math
import os
import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tft_algos import Manager, Optimizer, SettingError, extend_mesh
from tft_coord.errors import CoordinationError
from tft_pg import ProcessGroupGloo


@dataclass(frozen=True)
class Settings:
    """The flags: how long, on what, with what model."""

    steps: int = 500
    batch: int = 24  # sequences a step, of all participants together
    context: int = 64  # characters a sequence
    characters: int = 1_000_000  # of text, at most
    width: int = 96
    layers: int = 3
    heads: int = 4
    learning_rate: float = 3e-3
    seed: int = 0
    print_every: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "seed" and not value > 0:
                raise SettingError(f"{name} is {value}; give more than 0")
        if self.width % (2 * self.heads):
            raise SettingError(f"width is {self.width}; give a multiple of {2 * self.heads}, for {self.heads} heads")
        if self.characters < 10 * (self.context + 1):  # a tenth is for validation
            raise SettingError(f"{self.characters} characters are too few for sequences of {self.context}")


class Attention(nn.Module):
    """Causal, each head's queries and keys rotated by their positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(dim=2)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, positions, size): each pair of numbers is turned by an angle."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    a, b = x.split(half, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class Block(nn.Module):
    """Attention and a SwiGLU, each on what is normalized and added to what was there."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        gate, value = self.up(self.norms[1](x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(F.silu(gate) * value)
        return result


class Decoder(nn.Sequential):
    """Llama's kind: from characters (batch, positions) to logits of the next ones (batch, positions, 128)."""

    def __init__(self, settings: Settings) -> None:
        width = settings.width
        blocks = [Block(width, settings.heads) for _ in range(settings.layers)]
        super().__init__(nn.Embedding(128, width), *blocks, nn.RMSNorm(width), nn.Linear(width, 128, bias=False))


def read_text(characters: int) -> Tensor:
    """Python's standard library, its files in the order of their names, as ASCII: the same wherever Python is."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_text(encoding="utf-8").encode("ascii", "replace")
        if len(text) >= characters:
            break
    return torch.frombuffer(text[:characters], dtype=torch.uint8).long()


class Training:
    """Model, optimizer and text of one process.

    Args:
        settings: the flags.
        mesh: its "dp" is across replica groups, "shard" inside this one.
    """

    def __init__(self, settings: Settings, mesh: DeviceMesh) -> None:
        self.settings = settings
        text = read_text(settings.characters)
        self.train_text, self.validation_text = text[: -len(text) // 10], text[-len(text) // 10 :]
        torch.manual_seed(settings.seed)
        self.model = Decoder(settings)
        for layer in [*self.model, self.model]:
            if isinstance(layer, Block | Decoder):
                fully_shard(layer, mesh=mesh["dp", "shard"])
        self.adam = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def set_learning_rate(self, step: int) -> None:
        """A warm-up, then half a cosine. It goes with the optimizer's state to whoever heals in this step."""
        warm_up = min(1.0, (step + 1) / 20)
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(step / self.settings.steps, 1.0))
        for group in self.adam.param_groups:
            group["lr"] = self.settings.learning_rate * warm_up * cosine

    def sequences(self, step: int, place: int, places: int) -> Tensor:
        """The share of one of so many places in a step's batch: (sequences, context + 1)."""
        drawn = torch.Generator().manual_seed(1_000_003 * self.settings.seed + step)
        starts = torch.randint(len(self.train_text) - self.settings.context, (self.settings.batch,), generator=drawn)
        return self.train_text[starts[place::places, None] + torch.arange(self.settings.context + 1)]

    def loss(self, sequences: Tensor) -> Tensor:
        """Of the characters that follow, their mean."""
        return F.cross_entropy(self.model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())

    def backward(self, step: int, place: int, places: int) -> float:
        """The gradients of a step. Returns: the loss of this place's share."""
        share = self.sequences(step, place, places)
        loss = self.loss(share)
        # The shares may differ by a sequence; the mean over all places is then still that over the batch.
        (loss * len(share) * places / self.settings.batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.item()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Of text that is never trained on."""
        length = self.settings.context + 1
        sequences = self.validation_text[: len(self.validation_text) // length * length].view(-1, length)
        losses = [self.loss(part) * len(part) for part in sequences[:512].split(64)]
        return sum(loss.item() for loss in losses) / len(sequences[:512])


def main(replica: int, replicas: int, settings: Settings) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= replica < replicas:
        raise SettingError(f"REPLICA_GROUP_ID is {replica} of NUM_REPLICA_GROUPS {replicas}; it counts from 0")
    if settings.batch < replicas * ranks:
        raise SettingError(f"a batch of {settings.batch} is too small for {replicas * ranks} processes")
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tft_algos").setLevel(logging.INFO)  # who joins, who is lost, who heals
    if ranks > 1:  # the processes of this replica group
        # Its own part of the store for each start: torchrun keeps the store, with the addresses of those that died.
        store, rank, _ = next(rendezvous("env://"))
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with Manager(ProcessGroupGloo(), replica_id=f"replica_{replica}") as manager:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        training = Training(settings, extend_mesh(manager, mesh))
        manager.register_state_dict_fn("model", training.model.load_state_dict, training.model.state_dict)
        manager.register_state_dict_fn("optimizer", training.adam.load_state_dict, training.adam.state_dict)
        optimizer = Optimizer(manager, training.adam)
        while manager.current_step() < settings.steps:
            step = manager.current_step()
            training.set_learning_rate(step)
            optimizer.zero_grad()  # starts the quorum
            # Who takes part is known when the quorum is there. Who heals gives zeros, whatever it computes.
            place = (manager.participating_rank() or 0) * ranks + dist.get_rank()
            loss = training.backward(step, place, max(manager.num_participants(), 1) * ranks)
            optimizer.step()  # steps if the group commits
            if manager.current_step() > step and manager.current_step() % settings.print_every == 0:
                participants = manager.num_participants()
                print(f"step {manager.current_step()} participants {participants} loss {loss:.4f}", flush=True)
        print(f"step {manager.current_step()} validation loss {training.validation_loss():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    for field, name, default in (("replica", "REPLICA_GROUP_ID", "0"), ("replicas", "NUM_REPLICA_GROUPS", "2")):
        parser.add_argument(f"--{name.lower()}", dest=field, type=int, default=os.environ.get(name, default))
    for flag in fields(Settings):
        kind: Any = type(flag.default)
        parser.add_argument(f"--{flag.name}", type=kind, default=flag.default)
    flags = vars(parser.parse_args())
    try:
        main(flags.pop("replica"), flags.pop("replicas"), Settings(**flags))
    except (SettingError, CoordinationError) as error:  # nothing that a traceback would help with
        parser.exit(2, f"{parser.prog}: {error}\n")
