"""The sharded cloner: what it learns depends neither on the number of ranks nor on how a batch is cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from batches import SPEC, K
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from dvla.cloning import Cloner
from dvla.config import CloningConfig, DataConfig, ModelConfig, RuntimeConfig, SftConfig
from dvla.datasets.recorded import RecordedDataset, RecordedEpisode
from dvla.datasets.samples import Samples
from dvla.datasets.statistics import compute_statistics
from dvla.models.policy_source import prepare_policy

STEPS, BATCH = 4, 11


def make_dataset():
    rng = np.random.default_rng(0)
    episodes = [
        RecordedEpisode(
            Path("file"),
            SPEC.instructions[number % 2],
            rng.normal(size=(length, 5)).astype(np.float32),
            rng.uniform(-1, 1, (length, 3)).astype(np.float32),
            lambda: iter(()),
        )
        for number, length in enumerate((9, 7, 5))
    ]
    return RecordedDataset(name="d", cameras=("top",), image_size=(64, 64), episodes=tuple(episodes))


def batches():
    rng = np.random.default_rng(1)
    return [rng.permutation(21)[:BATCH] for _ in range(STEPS)]


def prepare(name, micro, **runtime):
    dataset = make_dataset()
    frames = np.random.default_rng(2).integers(0, 256, (21, 1, 64, 64, 3), np.uint8)
    config = SftConfig(
        data=DataConfig(paths=("d",)),
        model=ModelConfig(name=name, preset="nano", num_action_chunks=K),
        sft=CloningConfig(micro_batch_size=micro, lr=1e-3, weight_decay=0.01, max_grad_norm=0.5),
        runtime=RuntimeConfig(**runtime),
    )
    source = prepare_policy(config.model, spec=SPEC, seed=0, statistics=compute_statistics(dataset, name))
    samples = Samples(dataset, frames, horizon=source.policy.num_imitated_steps, device=torch.device("cpu"))
    return config, source, samples


def reference(name):
    """The same steps in one plain process, without any of the cloner's code but its noise keys."""
    config, source, samples = prepare(name, BATCH)
    policy = source.policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=config.sft.adam_betas, weight_decay=0.01)
    from dvla.rl.noise import decision_keys

    losses, norms = [], []
    for step, rows in enumerate(batches()):
        batch = samples.batch(rows)
        tickets = torch.from_numpy(rows)
        loss, *_ = policy.imitation_loss(
            batch.observation, batch.actions, decision_keys(0, tickets, torch.full_like(tickets, step + 1))
        )
        mean = loss.mean(-1)[batch.mask].mean()
        optimizer.zero_grad()
        mean.backward()
        losses.append(mean.item())
        norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5).item())
        optimizer.step()
    return losses, norms, {name: parameter.detach() for name, parameter in policy.named_parameters()}


def train(world, name, micro, runtime):
    config, source, samples = prepare(name, micro, **runtime)
    cloner = Cloner(source, world, config)
    assert any(isinstance(parameter, DTensor) for parameter in cloner.model.parameters())
    losses, norms = [], []
    for step, rows in enumerate(batches()):
        sums = cloner.accumulate(samples, rows, step)
        torch.distributed.all_reduce(sums, group=world.learners_pg)
        losses.append((sums[0] / sums[1]).item())
        norms.append(cloner.step(1e-3, step))
    held_out = cloner.measure(samples, np.arange(5))
    torch.distributed.all_reduce(held_out, group=world.learners_pg)
    again = cloner.measure(samples, np.arange(5))
    torch.distributed.all_reduce(again, group=world.learners_pg)
    assert torch.equal(held_out[:3], again[:3])
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in cloner.model.named_parameters()}
    return losses, norms, {n: p.detach() for n, p in full.items()}, held_out[:3].tolist()


def train_all(world, name, cases):
    return [train(world, name, *case) for case in cases]


CASES = {
    1: [(BATCH, {}), (4, {"sync_every_micro_batch": True})],
    2: [(BATCH, {}), (3, {}), (5, {"sync_every_micro_batch": True, "activation_checkpointing": True})],
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_ranks_and_micro_batches_change_nothing(name):
    losses, norms, parameters = reference(name)
    assert max(norms) > 0.5, "clipping must act in this test"
    held_out = []
    for world_size, cases in CASES.items():
        for results in run_ranks(train_all, world_size, name, cases):
            for (case_losses, case_norms, case_parameters, measured), case in zip(results, cases, strict=True):
                assert case_losses == pytest.approx(losses, rel=1e-5), case
                assert case_norms == pytest.approx(norms, rel=1e-4), case
                for key, value in parameters.items():
                    assert (case_parameters[key] - value).abs().max() <= 2e-5, (case, key)
                held_out.append(measured)
    for measured in held_out:
        assert measured == pytest.approx(held_out[0], rel=1e-4)
