"""The paper's throughput table from stage costs: run ``python perf/paper_table.py``.

arXiv 2605.13276 gives control steps a second, not costs. A batch is 163,840 control steps on 16 GPUs (2,048 environments of 80
steps) and half of that on 8. `STAGES` are the costs with which `dvla.planning` gives the rows marked `fitted`; with the same
costs it foretells the others. A round of a rank's E environments, simulated and decided on, takes f + r E; training takes
g for a decision. What lies far off cannot come from these costs: docs/planning.md says why.
"""

from __future__ import annotations

from runs import store

from dvla.config import AlgoConfig, Config, EnvConfig, ModelConfig, Placement, PlacementConfig, RuntimeConfig, Schedule
from dvla.planning.forecast import forecast
from dvla.planning.profile import Cost, Profile

EPISODE_STEPS = 80
GROUP_SIZE = 8
RANKS_OF_NODE = 8
CHUNKS = {"pi0.5": 5, "OpenVLA-OFT": 8}
STAGES = {  # f and r in seconds a round, g in seconds a decision
    "pi0.5": (3.77, 0.1044, 0.0532),
    "OpenVLA-OFT": (0.0, 0.255, 0.2075),
}
SEPARATED = {ratio: PlacementConfig(name=Placement.separated, ratio=ratio) for ratio in ("1:1", "3:1")}
OURS = {"max_staleness": 1}
IN_TURN = {"max_staleness": 0}  # a batch is sampled, then trained on

# system, model, GPUs, environments, placement, schedule, published control steps a second, whether costs are from it
ROWS = [
    ("D-VLA 1:1", "pi0.5", 16, 2048, SEPARATED["1:1"], OURS, 336.04, True),
    ("D-VLA 3:1", "pi0.5", 16, 2048, SEPARATED["3:1"], OURS, 376.00, True),
    ("D-VLA sweep (3:1)", "pi0.5", 16, 384, SEPARATED["3:1"], OURS, 270.0, True),
    ("D-VLA sweep (3:1)", "pi0.5", 16, 768, SEPARATED["3:1"], OURS, 379.0, False),
    ("D-VLA sweep (3:1)", "pi0.5", 16, 1536, SEPARATED["3:1"], OURS, 370.0, False),
    ("D-VLA sweep (3:1)", "pi0.5", 16, 3072, SEPARATED["3:1"], OURS, 360.0, False),
    ("D-VLA 1:1", "pi0.5", 8, 1024, SEPARATED["1:1"], OURS, 147.0, False),
    ("D-VLA 3:1", "pi0.5", 8, 1024, SEPARATED["3:1"], OURS, 237.0, False),
    ("RLinf disaggregated 1:1", "pi0.5", 16, 2048, SEPARATED["1:1"], IN_TURN, 150.58, False),
    ("RLinf disaggregated 3:1", "pi0.5", 16, 2048, SEPARATED["3:1"], IN_TURN, 175.29, False),
    ("RLinf co-located", "pi0.5", 16, 2048, None, IN_TURN, 232.23, False),
    ("RLinf co-located", "pi0.5", 8, 1024, None, IN_TURN, 127.24, False),
    ("D-VLA 1:1", "OpenVLA-OFT", 16, 2048, SEPARATED["1:1"], OURS, 250.90, True),
    ("D-VLA 3:1", "OpenVLA-OFT", 16, 2048, SEPARATED["3:1"], OURS, 154.23, True),
    ("D-VLA (1:1)", "OpenVLA-OFT", 8, 1024, SEPARATED["1:1"], OURS, 156.0, False),
    ("RLinf disaggregated 1:1", "OpenVLA-OFT", 16, 2048, SEPARATED["1:1"], IN_TURN, 107.23, False),
    ("RLinf disaggregated 3:1", "OpenVLA-OFT", 16, 2048, SEPARATED["3:1"], IN_TURN, 99.33, False),
    ("RLinf co-located", "OpenVLA-OFT", 16, 2048, None, IN_TURN, 87.20, False),
    ("RLinf co-located", "OpenVLA-OFT", 8, 1024, None, IN_TURN, 108.24, False),
]


def foretell(model: str, gpus: int, num_envs: int, placement: PlacementConfig | None, algo: dict) -> float:
    """Control steps a second."""
    nodes = gpus // RANKS_OF_NODE
    fixed_s, each_s, gradient_s = STAGES[model]
    profile = Profile(
        chunk=Cost(fixed_s=fixed_s, each_s=each_s),
        gradient=Cost(each_s=gradient_s),
        episode_decisions=(EPISODE_STEPS // CHUNKS[model],),
        steps_per_decision=CHUNKS[model],
        is_batch_simulator=True,
        has_accelerators=True,
    )
    samplers = {None: 1.0, "1:1": 0.5, "3:1": 0.75}[placement and placement.ratio] * gpus
    config = Config(
        env=EnvConfig(max_episode_steps=EPISODE_STEPS),
        model=ModelConfig(num_action_chunks=CHUNKS[model]),
        placement=placement or PlacementConfig(),
        runtime=RuntimeConfig(
            schedule=Schedule.overlapped if placement else Schedule.serial,
            num_envs=round(num_envs / samplers),
            max_batch=1024,
            max_wait_s=0.0,
            balance=False,
        ),
        algo=AlgoConfig(group_size=GROUP_SIZE, groups_per_step=num_envs // GROUP_SIZE, **algo),
    )
    return forecast(config, profile, num_nodes=nodes, ranks_per_node=RANKS_OF_NODE).env_steps_per_s


def main() -> None:
    """Foretell and store."""
    rows = []
    for system, model, gpus, num_envs, placement, algo, published, is_fitted in ROWS:
        told = foretell(model, gpus, num_envs, placement, algo)
        rows.append(
            {
                "system": system,
                "model": model,
                "gpus": gpus,
                "envs": num_envs,
                "published": published,
                "forecast": told,
                "error_frac": told / published - 1,
                "how": "fitted" if is_fitted else "foretold",
            }
        )
    store("paper_table", rows)


if __name__ == "__main__":
    main()
