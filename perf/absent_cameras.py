"""What leaving out absent cameras and padding is worth to pi0.5: run ``python perf/absent_cameras.py``."""

from __future__ import annotations

import torch
from models import BATCH, milliseconds
from runs import store

from dvla.envs.protocol import EnvSpec
from dvla.models.pi05 import Pi05
from dvla.models.pi05_config import PRESETS


def main() -> None:
    """Compare and store: a prefix of one camera of three and a short prompt, the rest masked or left out."""
    torch.set_num_threads(1)
    spec = EnvSpec(
        name="x", cameras=("a", "b", "c"), image_size=(64, 64), state_dim=8, action_dim=7, max_episode_steps=8,
        instructions=("pick up the cube",),
    )  # fmt: skip
    policy = Pi05(PRESETS["tiny"], spec=spec, num_action_chunks=8, temperature=1.0)
    images = torch.zeros(BATCH, 3, 64, 64, 3, dtype=torch.uint8)
    mask = torch.tensor([[True, False, False]]).expand(BATCH, -1)
    ids = policy.prompt_ids.expand(BATCH, -1)
    padded = torch.nn.functional.pad(ids, (0, 200 - ids.shape[1]))
    tokens = (torch.arange(200) < ids.shape[1]).expand(BATCH, -1)
    with torch.inference_mode():
        full = milliseconds(lambda: policy.encode(images, mask, padded, tokens))
        short = milliseconds(lambda: policy.encode(images[:, :1], None, ids, None))
    row = {"name": "pi05 tiny, prefix of 8", "masked_ms": full, "left_out_ms": short, "ratio": full / short}
    store("absent_cameras", [row])


if __name__ == "__main__":
    main()
