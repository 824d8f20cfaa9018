"""Episode slots and a GPU: batches come straight out of pinned shared memory and go back into it, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dvla.envs.protocol import EnvSpec
from dvla.planes.observations import SlotTensors
from dvla.planes.slots import SlotField, layout_bytes, slot_arrays, slot_layout
from dvla.runtime.device import finish_copies
from gpu.check import Findings, check
from gpu.shared_memory import pinned, shared_memory
from gpu.timing import gigabytes_per_second

if TYPE_CHECKING:
    from torch import Tensor

SLOTS, DECISIONS, K, A = 16, 8, 8, 7


def _layout(image_size: tuple[int, int]) -> list[SlotField]:
    spec = EnvSpec(
        name="check",
        cameras=("front", "wrist"),
        image_size=image_size,
        state_dim=9,
        action_dim=A,
        max_episode_steps=K * DECISIONS,
        instructions=("push the cube", "lift the peg"),
    )
    record = {"tokens": ((K, A), "uint8")}
    return slot_layout(spec, num_slots=SLOTS, max_decisions=DECISIONS, num_action_chunks=K, record=record)


def _filled(layout: list[SlotField]) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Slot memory with noise in it, and its fields."""
    memory = shared_memory(layout_bytes(layout))
    arrays = slot_arrays(memory, layout)
    rng = np.random.default_rng(0)
    arrays["images"][...] = rng.integers(0, 256, arrays["images"].shape, np.uint8)
    arrays["state"][...] = rng.standard_normal(arrays["state"].shape)
    arrays["task"][...] = rng.integers(0, 2, SLOTS)
    arrays["record.tokens"][...] = rng.integers(0, 256, arrays["record.tokens"].shape, np.uint8)
    return memory, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _places(count: int) -> tuple[Tensor, Tensor]:
    """`count` different places, in no order."""
    picked = torch.randperm(SLOTS * DECISIONS, generator=torch.Generator().manual_seed(count))[:count]
    return picked // DECISIONS, picked % DECISIONS


def _compare(found: Findings, slots: SlotTensors, fields: dict[str, Tensor], where: str) -> None:
    """Gather and scatter batches of several sizes, and compare with plain indexing on the host."""
    device = found.device
    for count in (1, 2, 32):
        places = _places(count)
        observation = slots.observation(*places)
        tokens = slots.record(*places)["tokens"]
        finish_copies(device)
        for name, got in (
            ("images", observation.images),
            ("state", observation.state),
            ("record.tokens", tokens),
        ):
            what = f"{name} of {count} from {where}"
            found.demand(got.device.type == device.type, f"{what}: on the device")
            found.demand(torch.equal(got.cpu(), fields[name][places].cpu()), f"{what}: equal to the bit")
        tasks = fields["task"][places[0]]
        found.demand(torch.equal(observation.task.cpu(), tasks.cpu()), f"task of {count} from {where}: equal")
        for name in ("actions", "logprobs"):
            values = torch.randn(count, K, A, device=device)
            before = fields[name].clone()
            slots.scatter(name, *places, values)
            finish_copies(device)
            before[places] = values.to(before.device)
            found.demand(torch.equal(fields[name], before), f"{name} of {count} into {where}: these places, no other")


@check()
def slot_batches_are_exact(found: Findings) -> None:
    """Batches gathered from slots and scattered into them equal plain indexing, from pinned and from device memory."""
    for image_size in ((32, 32), (224, 224)):  # below and above the size from which an entry is a copy of its own
        memory, fields = _filled(_layout(image_size))
        with pinned(memory, found.device):
            _compare(found, SlotTensors(fields, found.device), fields, f"pinned slots {image_size}")
        own = {name: tensor.to(found.device) for name, tensor in fields.items()}  # as with a simulator on the GPU
        _compare(found, SlotTensors(own, found.device), own, f"device slots {image_size}")
        found.figure(f"entry of {image_size[0]} px KiB", fields["images"][0, 0].nbytes / 2**10)


@check()
def slot_batches_take_no_detour(found: Findings) -> None:
    """Pictures go from pinned slots to the device faster than through a batch in pageable memory."""
    device, count = found.device, 64
    layout = _layout((224, 224) if found.on_gpu else (64, 64))
    memory, fields = _filled(layout)
    images, places = fields["images"], _places(count)
    size = count * images[0, 0].nbytes
    there = torch.empty(size, dtype=torch.uint8, device=device)
    whole = images.flatten()[:size]
    with pinned(memory, device):
        slots = SlotTensors(fields, device)
        found.demand(images[3, 5].is_pinned() or not found.on_gpu, "an entry of a slot is pinned memory")
        plain = gigabytes_per_second(lambda: there.copy_(whole, non_blocking=True), size, device)
        batch = gigabytes_per_second(lambda: slots.gather("images", *places), size, device)
        detour = gigabytes_per_second(lambda: images[places].to(device), size, device)
        one = _places(1)
        single = gigabytes_per_second(lambda: slots.gather("images", *one), size // count, device)
    found.figure("one plain copy GB/s", plain)
    found.figure(f"batch of {count} GB/s", batch)
    found.figure("single GB/s", single)
    found.figure("by a pageable batch GB/s", detour)
    found.demand(batch > detour or not found.on_gpu, "the way straight from the slots is the faster one")
    found.demand(batch > plain / 5 or not found.on_gpu, "a batch comes at a fifth of the speed of one copy, or faster")
