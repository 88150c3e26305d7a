"""A language model of Python's own source, trained with HSDP: FSDP2 inside a replica group, fault tolerance across.

    (umask 077; openssl rand -hex 32 > tft-token)                                   # once
    export TFT_TOKEN_FILE=$PWD/tft-token                                            # in each shell
    tft-lighthouse --min_replicas 1                                                 # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 python train_lm.py     # shell 2
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=1 python train_lm.py     # shell 3

Or, with two processes a replica group, `torchrun --standalone --nproc_per_node=2 --max_restarts=10 train_lm.py` in
shells 2 and 3. Kill any process, and restart it. torchrun restarts its processes itself.

The training data of a step depends only on the seed and the committed step, and the participants of the step share it.
So the gradient is the same with any number of participants, and a failed step is repeated. A run in which groups died
and came back ends with the loss of a run without failures.

On a link that is too slow for that, groups train apart and synchronize now and then: Streaming DiLoCo with

    train_lm.py --fault_tolerance.semi_sync_method=diloco --fault_tolerance.sync_steps=40 \\
        --fault_tolerance.num_fragments=2 --fault_tolerance.fragment_sync_delay=5

or the same in a file, `train_lm.py --config lm.toml`, which may have tables [training] (the flags without a dot) and
[fault_tolerance]. A flag overrides the environment, and the environment overrides the file, which all groups may share.
"""

import argparse
import difflib
import importlib
import logging
import math
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tft_algos import ConfigError, DiLoCo, LocalSGD, Manager, Optimizer, extend_mesh, fragment_model
from tft_coord.errors import CoordinationError
from tft_pg import ProcessGroupGloo, ProcessGroupNCCL, init_group

METHODS = ("diloco", "local_sgd", "none")
USED_BY = dict.fromkeys(("sync_steps", "rank0_synchronization_only"), ("diloco", "local_sgd")) | dict.fromkeys(
    ("num_fragments", "fragment_sync_delay", "fragment_update_alpha", "copy_pseudogradients_to_cpu"), ("diloco",)
)
VARIABLES = {
    "REPLICA_GROUP_ID": "replica_id",
    "NUM_REPLICA_GROUPS": "group_size",
    "TFT_RANK0_SYNCHRONIZATION_ONLY": "rank0_synchronization_only",
}
WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Settings:
    """The flags on length, data and model."""

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
        check_kinds(self, "")
        for name, value in vars(self).items():
            if name != "seed" and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; give more than 0")
        if not -(2**31) <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed}; give one of at most 31 bits")
        if self.width % (2 * self.heads):
            raise ConfigError(f"width is {self.width}; give a multiple of {2 * self.heads}, for {self.heads} heads")
        if self.characters < 10 * (self.context + 1):  # a tenth is for validation
            raise ConfigError(f"{self.characters} characters are too few for sequences of {self.context}")


@dataclass(frozen=True)
class FaultTolerance:
    """The flags `--fault_tolerance.NAME`, and the table `[fault_tolerance]`."""

    enable: bool = True  # False: this replica group trains alone, without a lighthouse
    replica_id: int = 0  # number of this group (or REPLICA_GROUP_ID)
    group_size: int = 2  # number of groups when all are there (or NUM_REPLICA_GROUPS)
    min_replica_size: int = 1  # participants needed for a step, or a synchronization, to commit
    process_group: str = "gloo"  # across the groups (or nccl)
    process_group_timeout_ms: int = 10_000  # for one reduction
    semi_sync_method: str = "none"  # synchronize in every step (or diloco, local_sgd)
    sync_steps: int = 20  # optimizer steps from one synchronization of a fragment to its next
    num_fragments: int = 1  # synchronized one after the other
    fragment_sync_delay: int = 0  # steps that a synchronization may take beside the training (needs diloco)
    fragment_update_alpha: float = 0.0  # share of its own weights that a group keeps, 0 to 1 (needs diloco)
    rank0_synchronization_only: bool = False  # groups may differ in their number of processes
    copy_pseudogradients_to_cpu: bool = False  # reduce them on the CPU

    def __post_init__(self) -> None:
        check_kinds(self, "fault_tolerance.")
        limits: dict[str, tuple[float, float, str]] = {  # minimum, maximum, and the setting that bounds it
            "group_size": (1, math.inf, ""),
            "replica_id": (0, self.group_size - 1, "group_size"),
            "min_replica_size": (1, self.group_size, "group_size"),
            "process_group_timeout_ms": (1, 604_800_000, ""),
            "sync_steps": (1, math.inf, ""),
            "num_fragments": (1, self.sync_steps, "sync_steps"),
            "fragment_sync_delay": (0, self.sync_steps - 1, "sync_steps"),
            "fragment_update_alpha": (0, 1, ""),
        }
        for name, (least, most, bound) in limits.items():
            if not least <= getattr(self, name) <= most:
                up_to = f"{least} or more" if most == math.inf else f"{least} to {most}"
                self._refuse(name, f"give {up_to}" + (f", or a larger fault_tolerance.{bound}" if bound else ""))
        for name, choices in (("process_group", ("gloo", "nccl")), ("semi_sync_method", METHODS)):
            if getattr(self, name) not in choices:
                self._refuse(name, f"give {', '.join(choices[:-1])} or {choices[-1]}")
        if self.process_group == "nccl" and not torch.cuda.is_available():
            self._refuse("process_group", "there is no CUDA device here, so give gloo")
        if self.sync_steps % self.num_fragments:
            self._refuse("sync_steps", f"give a multiple of fault_tolerance.num_fragments, {self.num_fragments}")
        for name, methods in USED_BY.items():
            is_set = getattr(self, name) != getattr(FaultTolerance, name)
            if is_set and self.enable and self.semi_sync_method not in methods:
                self._refuse(name, f"set fault_tolerance.semi_sync_method to {' or '.join(methods)}, or leave this out")

    def _refuse(self, name: str, remedy: str) -> NoReturn:
        or_variable = next((f" (or {variable})" for variable, of in VARIABLES.items() if of == name), "")
        raise ConfigError(f"fault_tolerance.{name}{or_variable} is {getattr(self, name)!r}; {remedy}")


def check_kinds(settings: Any, prefix: str) -> None:
    """Check that each value has the type of its default. Raises: ConfigError: one has not."""
    for flag in fields(settings):
        kind: Any = type(flag.default)
        value = getattr(settings, flag.name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"{prefix}{flag.name} is {value!r}; give {WANTED[kind]}")


class Attention(nn.Module):
    """Causal attention. Each head's queries and keys are rotated by their positions."""

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
    """Apply the rotary position embedding to (batch, heads, positions, size): rotate each pair by an angle."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    a, b = x.split(half, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class Block(nn.Module):
    """Attention and a SwiGLU, each on normalized input, with a residual connection."""

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
    """A decoder like Llama: from characters (batch, positions) to logits of the next ones (batch, positions, 128)."""

    def __init__(self, settings: Settings) -> None:
        width = settings.width
        blocks = [Block(width, settings.heads) for _ in range(settings.layers)]
        super().__init__(nn.Embedding(128, width), *blocks, nn.RMSNorm(width), nn.Linear(width, 128, bias=False))


def read_text(characters: int) -> Tensor:
    """Return Python's standard library as ASCII, its files in the order of their names: equal for equal Pythons."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_text(encoding="utf-8").encode("ascii", "replace")
        if len(text) >= characters:
            break
    return torch.frombuffer(text[:characters], dtype=torch.uint8).long()


class Training:
    """The model, optimizer and text of one process.

    Args:
        settings: the flags.
        mesh: "shard" of this replica group. For every step's gradients it also has a "dp" across replica groups.
    """

    def __init__(self, settings: Settings, mesh: DeviceMesh) -> None:
        self.settings, self.device = settings, torch.device(mesh.device_type)
        text = read_text(settings.characters)
        self.train_text, self.validation_text = text[: -len(text) // 10], text[-len(text) // 10 :]
        torch.manual_seed(settings.seed)
        self.model = Decoder(settings).to(self.device)
        for layer in [*self.model, self.model]:
            if isinstance(layer, Block | Decoder):
                fully_shard(layer, mesh=mesh["dp", "shard"] if mesh.ndim == 2 else mesh)
        self.adam = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def set_learning_rate(self, step: int) -> None:
        """Set a warm-up, then half a cosine. A replica that heals in this step gets it with the optimizer's state."""
        warm_up = min(1.0, (step + 1) / 20)
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(step / self.settings.steps, 1.0))
        for group in self.adam.param_groups:
            group["lr"] = self.settings.learning_rate * warm_up * cosine

    def sequences(self, step: int, place: int, places: int) -> Tensor:
        """Return the share of one place, out of `places`, in a step's batch: (sequences, context + 1)."""
        drawn = torch.Generator().manual_seed(1_000_003 * self.settings.seed + step)
        starts = torch.randint(len(self.train_text) - self.settings.context, (self.settings.batch,), generator=drawn)
        return self.train_text[starts[place::places, None] + torch.arange(self.settings.context + 1)]

    def loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss of predicting each next character."""
        sequences = sequences.to(self.device)
        return F.cross_entropy(self.model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())

    def backward(self, step: int, place: int, places: int) -> float:
        """Compute the gradients of a step. Returns: the loss of this place's share."""
        share = self.sequences(step, place, places)
        loss = self.loss(share)
        # The shares may differ by a sequence. The mean over all places still equals the mean over the batch.
        (loss * len(share) * places / self.settings.batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.item()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the loss on text that is never trained on."""
        length = self.settings.context + 1
        sequences = self.validation_text[: len(self.validation_text) // length * length].view(-1, length)
        losses = [self.loss(part) * len(part) for part in sequences[:512].split(64)]
        return sum(loss.item() for loss in losses) / len(sequences[:512])


def main(settings: Settings, ft: FaultTolerance) -> None:
    ranks, each = parse("WORLD_SIZE", os.environ.get("WORLD_SIZE") or "1", int), ft.sync_steps // ft.num_fragments
    if ranks < 1:
        raise ConfigError(f"WORLD_SIZE is {ranks}; give 1 or more, or start it with torchrun")
    if absent := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if ranks > 1 and not os.environ.get(name)]:
        raise ConfigError(f"WORLD_SIZE is {ranks} without {' and '.join(absent)}; set them too, or use torchrun")
    if ranks > 1 and not 0 <= (rank := parse("RANK", os.environ["RANK"], int)) < ranks:
        raise ConfigError(f"RANK is {rank} of WORLD_SIZE {ranks}; give 0 to {ranks - 1}, or use torchrun")
    if ft.enable and ft.semi_sync_method != "none" and settings.steps < each:
        raise ConfigError(f"steps is {settings.steps}; give at least {each}, to the end of the first synchronization")
    if settings.batch < ft.group_size * ranks:
        raise ConfigError(f"batch is {settings.batch}; give at least {ft.group_size * ranks}, one for each process")
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tft_algos").setLevel(logging.INFO)  # shows joins, losses and heals
    mesh = own_mesh(ranks)
    if not ft.enable:
        training = Training(settings, mesh)
        say_loss(training, train_alone(training))
    else:
        group = ProcessGroupNCCL if ft.process_group == "nccl" else ProcessGroupGloo
        with Manager(
            group(timeout=timedelta(milliseconds=ft.process_group_timeout_ms)),
            replica_id=f"replica_{ft.replica_id}",
            min_replica_size=ft.min_replica_size,
            rank0_synchronization_only=ft.rank0_synchronization_only,
        ) as manager:
            together = ft.semi_sync_method == "none"
            training = Training(settings, extend_mesh(manager, mesh) if together else mesh)
            steps = train_together(manager, training) if together else train_apart(manager, training, ft)
            say_loss(training, steps)
    dist.destroy_process_group()


def say_loss(training: Training, steps: int) -> None:
    print(f"step {steps} validation loss {training.validation_loss():.4f}", flush=True)


def own_mesh(ranks: int) -> DeviceMesh:
    """Return the mesh of the processes of this replica group."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    init_group(device)
    return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))


def train_alone(training: Training) -> int:
    """Train without fault tolerance. Returns: number of steps."""
    for step in range(training.settings.steps):
        training.set_learning_rate(step)
        training.adam.zero_grad()
        loss = training.backward(step, dist.get_rank(), dist.get_world_size())
        training.adam.step()
        if (step + 1) % training.settings.print_every == 0:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
    return training.settings.steps


def train_together(manager: Manager, training: Training) -> int:
    """Train all groups together, synchronized in every step. Returns: number of steps."""
    settings = training.settings
    manager.register_state_dict_fn("model", training.model.load_state_dict, training.model.state_dict)
    manager.register_state_dict_fn("optimizer", training.adam.load_state_dict, training.adam.state_dict)
    optimizer = Optimizer(manager, training.adam)
    while manager.current_step() < settings.steps:
        step = manager.current_step()
        training.set_learning_rate(step)
        optimizer.zero_grad()  # starts the quorum
        # The participants are known when the quorum is there. A healing replica contributes zeros, whatever it
        # computes.
        place = (manager.participating_rank() or 0) * dist.get_world_size() + dist.get_rank()
        loss = training.backward(step, place, max(manager.num_participants(), 1) * dist.get_world_size())
        optimizer.step()  # steps if the group commits
        if manager.current_step() > step and manager.current_step() % settings.print_every == 0:
            participants = manager.num_participants()
            print(f"step {manager.current_step()} participants {participants} loss {loss:.4f}", flush=True)
    return manager.current_step()


def train_apart(manager: Manager, training: Training, ft: FaultTolerance) -> int:
    """Train the groups apart, synchronized now and then: only synchronizations commit. Returns: number of steps."""
    settings, each = training.settings, ft.sync_steps // ft.num_fragments  # steps from one synchronization to the next
    last = 1 + settings.steps // each  # the first one only makes all groups begin with the same weights
    place, places = ft.replica_id + ft.group_size * dist.get_rank(), ft.group_size * dist.get_world_size()
    step = -1
    with semi_synchronous(manager, training, ft):
        while manager.current_step() < last:
            before = manager.current_step()
            step = max(step + 1, (before - 1) * each)  # a newcomer starts where the others are
            training.set_learning_rate(step)
            training.adam.zero_grad()
            loss = training.backward(step, place, places)
            training.adam.step()  # at some steps a synchronization starts here, or ends
            now = manager.current_step()
            if now > before and (now - 1) % max(settings.print_every // each, 1) == 0:
                what = f"step {step + 1} synchronizations {now - 1} participants {manager.num_participants()}"
                print(f"{what} loss {loss:.4f}", flush=True)
    return step + 1


def semi_synchronous(manager: Manager, training: Training, ft: FaultTolerance) -> AbstractContextManager[Any]:
    """Return a context manager that synchronizes while it is entered."""
    if ft.semi_sync_method == "local_sgd":
        return LocalSGD(manager, training.model, training.adam, sync_every=ft.sync_steps)
    fragments = fragment_model(training.model, ft.num_fragments)
    outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]
    return DiLoCo(
        manager,
        fragments,
        training.adam,
        outer,
        sync_every=ft.sync_steps,
        fragment_sync_delay=ft.fragment_sync_delay,
        fragment_update_alpha=ft.fragment_update_alpha,
        copy_pseudogradients_to_cpu=ft.copy_pseudogradients_to_cpu,
    )


# --- the flags -------------------------------------------------------------------------------------------------------


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, FaultTolerance]:
    """Read settings from the flags, the environment, the file that `--config` names, and the defaults, in this order.

    Raises: ConfigError: a value is invalid, or a setting is unknown. Its one sentence gives the remedy.
    """
    kinds: dict[str, Any] = {flag.name: type(flag.default) for flag in fields(Settings)}
    kinds |= {f"fault_tolerance.{flag.name}": type(flag.default) for flag in fields(FaultTolerance)}
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML, with tables [training] and [fault_tolerance]")
    for name, kind in kinds.items():
        bare: Any = {"nargs": "?", "const": "true"} if kind is bool else {}
        parser.add_argument(f"--{name}", metavar=kind.__name__.upper(), help=f"give {WANTED[kind]}", **bare)
    given, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        name = word.lstrip("-").partition("=")[0]
        raise ConfigError(f"{word} is no flag of this program; {nearest(name, kinds, '--')}")
    flags = vars(given)
    values = read_file(flags.pop("config"), kinds) if "config" in flags else {}
    for variable, name in VARIABLES.items():
        if environ.get(variable):
            name = f"fault_tolerance.{name}"
            values[name] = parse(variable, environ[variable], kinds[name])
    values |= {name: parse(f"--{name}", text, kinds[name]) for name, text in flags.items()}
    of_ft = {name.partition(".")[2]: value for name, value in values.items() if "." in name}
    return Settings(**{name: value for name, value in values.items() if "." not in name}), FaultTolerance(**of_ft)


def read_file(file: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the file's values by the names of the flags."""
    try:
        read: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads
        # some editors write a byte order mark before the text
        tables = read(Path(file).read_text(encoding="utf-8-sig"))
    except ModuleNotFoundError as error:
        raise ConfigError("--config needs Python 3.11, or the package tomli; install it, or give flags") from error
    except (OSError, ValueError) as error:  # invalid TOML and invalid text are ValueErrors
        raise ConfigError(f"--config is {file!r}, which can't be read ({error}); give a file of TOML") from error
    values = {}
    for table, content in tables.items():
        if table not in ("training", "fault_tolerance") or not isinstance(content, dict):
            raise ConfigError(f"{file} has {table!r}; give it tables [training] and [fault_tolerance]")
        for name, value in content.items():
            full = name if table == "training" else f"fault_tolerance.{name}"
            if full not in kinds or "." in name:
                raise ConfigError(f"{file} sets {name!r} in [{table}], which there is not; {nearest(full, kinds, '')}")
            values[full] = value
    return values


def parse(name: str, text: str, kind: Any) -> Any:
    """Return the value of a flag or a variable."""
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {text[:64]!r}; give {WANTED[kind]}") from None


def nearest(name: str, kinds: dict[str, Any], dashes: str) -> str:
    """Return a hint with the nearest name."""
    return f"the nearest is {dashes}{difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]}"


if __name__ == "__main__":
    try:
        main(*read_settings(sys.argv[1:], os.environ))
    except (ConfigError, CoordinationError) as error:  # a traceback would not help with these
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
