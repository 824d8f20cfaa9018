"""Compare the models with recordings of their originals: ``python tests/golden.py FOLDER``.

FOLDER holds a checkpoint in its true layout, inputs and outputs (see the README beside the recordings). Everything goes
through the product's own loaders and preprocessing. One JSON object per compared tensor is printed: its name, the largest
absolute difference, the tolerance; the exit code is 1 if one is beyond. Sizes, seeds and vocabularies come from the folder.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dvla.config import ModelConfig
from dvla.envs.protocol import EnvSpec
from dvla.models.checkpoint import build_from_checkpoint, open_checkpoint
from dvla.models.normalization import read_openvla_statistics
from dvla.models.openvla_oft import OpenVLAOFT
from dvla.models.openvla_oft_config import NUM_BINS
from dvla.models.pi05 import Pi05, time_embedding
from dvla.models.pi05_prompt import clean_text, prompt_text, state_bins, tokenize
from dvla.models.policy import Observation
from dvla.models.resize import resize, resize_with_pad
from dvla.models.tokenizer import TextTokenizer, load_tokenizer
from dvla.rl.flow import ode_step, step_times

FP32, LOOSE, EXACT = 1e-4, 2e-4, 0.0
FLOAT64 = 1e-9
Comparison = tuple[str, float, float]


def difference(got: Any, want: Any) -> float:
    """Largest absolute difference; infinite where shapes differ or a value is no number."""
    got, want = torch.as_tensor(np.asarray(got)).double(), torch.as_tensor(np.asarray(want)).double()
    if got.shape != want.shape:
        return math.inf
    value = (got - want).abs().max().item() if got.numel() else 0.0
    return math.inf if math.isnan(value) else value


class Recorded(dict):
    """Recorded tensors by name, which knows what was compared."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.compared: set[str] = set()

    def to(self, got: Any, name: str, tolerance: float) -> Iterator[Comparison]:
        """Compare `got` with the tensor of this name, if it was recorded."""
        if name in self:
            self.compared.add(name)
            yield name, difference(got, self[name]), tolerance


def environment(dims: dict[str, int], cameras: int, tasks: int) -> EnvSpec:
    """An environment of the recording's sizes."""
    return EnvSpec(
        name="recording",
        cameras=tuple(f"camera{i}" for i in range(cameras)),
        image_size=(dims["image"], dims["image"]),
        state_dim=dims["state"],
        action_dim=dims["action"],
        max_episode_steps=1000,
        instructions=tuple(f"task {i}" for i in range(tasks)),
        gripper_open=1.0,
    )


def load_policy(folder: Path, model: ModelConfig, spec: EnvSpec, build: Any, tokenizer: TextTokenizer) -> Any:
    """The policy with the folder's weights, as a run would get it."""
    checkpoint = replace(open_checkpoint(model, with_tokenizer=False), tokenizer=tokenizer)
    policy = build_from_checkpoint(build, checkpoint, spec, model).to_empty(device="cpu")
    checkpoint.load(policy, seed=0)
    return policy.eval()


# -- pi0.5 -----------------------------------------------------------------------------------------------------------


def compare_pi05(folder: Path) -> Iterator[Comparison]:
    """All comparisons of a pi0.5 folder."""
    meta = json.loads((folder / "meta.json").read_text())
    dims = meta["dims"]
    given = {name.removeprefix("in."): value for name, value in load_file(folder / "inputs.safetensors").items()}
    outputs = load_file(folder / "outputs.safetensors")
    want = Recorded({name.removeprefix("out."): value for name, value in outputs.items()})
    cameras = meta["image_order"]
    model = ModelConfig(
        name="pi05",
        checkpoint=str(folder),
        unnorm_key=meta.get("asset_id"),
        num_action_chunks=dims["action_horizon"],
        options={"vision_heads": dims["vision"]["num_attention_heads"], "max_token_len": dims["max_token_len"]},
    )
    sizes = {"image": dims["vision"]["image_size"], "state": meta["real_state_dim"], "action": meta["real_action_dim"]}
    with np.load(folder / "preprocess.npz") as archive:
        arrays = dict(archive)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "tokenizer.model")
        file.write_bytes(arrays["tokenizer_model_bytes"].tobytes())
        tokenizer = load_tokenizer("tokenizer", file)
    policy: Pi05 = load_policy(folder, model, environment(sizes, len(cameras), 1), Pi05, tokenizer)

    images = torch.stack([given[f"image.{camera}"] for camera in cameras], dim=1)
    image_mask = torch.stack([given[f"image_mask.{camera}"] for camera in cameras], dim=1)
    ids, token_mask = given["tokenized_prompt"], given["tokenized_prompt_mask"]
    with torch.no_grad():
        yield from _pi05_prefix(policy, want, cameras, (images, image_mask, ids, token_mask))
        prefix = policy.encode(images, image_mask, ids, token_mask)
        batch = len(ids)
        for index, time in enumerate(given["t_velocity"].tolist()):
            name, t = f"velocity.{index}", torch.full((batch,), time)
            x = time * given["noise"] + (1 - time) * given["actions"]
            embedded = time_embedding(t, policy.config.expert_hidden_size).float()
            hidden = policy.denoise(prefix, x, t)
            for part, got in (
                ("x_t", x),
                ("time_emb", embedded),
                ("adarms_cond", policy.condition(t)),
                ("suffix_embs", policy.action_in_proj(x)),
                ("suffix_out", hidden),
                ("v_t", policy.velocity(hidden)),
            ):
                yield from want.to(got, f"{name}.{part}", FP32)
        for name in sorted({name.split(".")[1] for name in want if name.startswith("sample.")}):
            steps = int(name.removeprefix("n"))
            x, path = given["noise"], [given["noise"]]
            for step in range(steps):
                t = step_times(torch.full((batch,), step), steps)
                x = ode_step(x, policy.velocity(policy.denoise(prefix, x, t)), steps)
                path.append(x)
            tolerance = FP32 if steps < 10 else LOOSE  # the original's clock drifts with the number of steps
            yield from want.to(torch.stack(path), f"sample.{name}.x", tolerance)
            yield from want.to(x, f"sample.{name}.actions", tolerance)
            yield from want.to(step_times(torch.arange(steps), steps), f"sample.{name}.t", FP32)
            if {f"sample.{name}.x", f"sample.{name}.t"} <= want.keys():
                # At the original's own samples and times: what differs here differs in the network.
                recorded = zip(want[f"sample.{name}.x"], want[f"sample.{name}.t"], strict=False)
                hidden = [policy.denoise(prefix, x, t.expand(batch)) for x, t in recorded]
                yield from want.to(torch.stack([policy.velocity(h) for h in hidden]), f"sample.{name}.v", tolerance)
    yield from _pi05_loss(policy, folder, given, want, (images, image_mask, ids, token_mask))
    yield from _pi05_preprocessing(policy, folder, arrays, want, tokenizer)
    report_rest(want)


def _pi05_prefix(policy: Pi05, want: Recorded, cameras: list[str], prefix: tuple[Tensor, ...]) -> Iterator[Comparison]:
    for index, camera in enumerate(cameras):
        pixels = policy.preprocess(prefix[0][:, index])
        yield from want.to(pixels, f"image_model_input.{camera}", FP32)
        yield from want.to(policy.vision(pixels).last_hidden_state, f"siglip_last_hidden.{camera}", FP32)
    embedded, mask = policy.embed(*prefix)
    assert mask is not None
    positions = mask.cumsum(1) - 1
    yield from want.to(embedded, "prefix_embs", FP32)
    yield from want.to(mask, "prefix_pad_masks", EXACT)
    yield from want.to(positions, "prefix_position_ids", EXACT)
    encoded = policy.encode(*prefix)
    # The last layer's output is never needed, so the policy leaves it out; here it is computed to be compared.
    hidden, rotary = embedded, policy.rotary(embedded, position_ids=positions)
    for layer in policy.prefix_layers:
        hidden, _ = layer(hidden, rotary, mask[:, None, None, :], True)
    keys, values = (torch.stack([layer[i] for layer in encoded.layers])[:, :, 0] for i in range(2))
    # Where there is no token, the original computes something that nobody reads.
    for name, got in (("prefix_k", keys), ("prefix_v", values), ("prefix_out", policy.prefix_norm(hidden))):
        if name in want:
            whole = want[name] if name == "prefix_out" else want[name][:, :, 0]
            here = mask if name == "prefix_out" else mask.expand(len(whole), -1, -1)
            want.compared.add(name)
            yield name, difference(got[here], whole[here]), FP32


def _pi05_loss(
    policy: Pi05, folder: Path, given: dict[str, Tensor], want: Recorded, prefix: tuple[Tensor, ...]
) -> Iterator[Comparison]:
    actions, noise, time = given["actions"], given["noise"], given["time"]
    encoded, t = policy.encode(*prefix), time[:, None, None]
    losses = policy.flow_loss(encoded, actions, noise, time)
    x = t * noise + (1 - t) * actions
    velocity = policy.velocity(policy.denoise(encoded, x, time))
    for name, got in (("x_t", x), ("u_t", noise - actions), ("v_t", velocity)):
        yield from want.to(got.detach(), f"loss.{name}", FP32)
    yield from want.to(losses.detach(), "loss.per_element", LOOSE)
    policy.zero_grad()
    losses.mean().backward()
    originals = {
        source.removeprefix("model."): rule.parts[0].parameter
        for rule in open_checkpoint(
            ModelConfig(name="pi05", checkpoint=str(folder), options={"vision_heads": policy.config.vision_heads}),
            with_tokenizer=False,
        ).weight_map.rules
        for source in rule.sources
    }
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    for name in [name for name in want if name.startswith("grad.")]:
        gradient = gradients[originals[name.removeprefix("grad.").removeprefix("model.")]]
        yield from want.to(math.nan if gradient is None else gradient, name, FP32)
    norms = folder / "grad_norms.json"
    for name, norm in json.loads(norms.read_text())["grad"].items() if norms.is_file() else ():
        original = originals.get(name.removeprefix("model."))
        if original is None:
            sys.stderr.write(f"not compared: grad_norm.{name}, a parameter this model does not have\n")
            continue
        gradient = gradients[original]
        got = 0.0 if gradient is None else gradient.norm().item()
        yield f"grad_norm.{name}", abs(got - norm["l2"]), FP32 * max(1.0, norm["l2"])


def _pi05_preprocessing(
    policy: Pi05, folder: Path, arrays: dict[str, np.ndarray], want: Recorded, tokenizer: TextTokenizer
) -> Iterator[Comparison]:
    assert policy.statistics is not None
    assert policy.statistics.state is not None
    action, state, size = policy.statistics.action, policy.statistics.state, policy.config.image_size
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        if kind == "norm":
            bounds = state if "state" in rest else action
            raw = torch.from_numpy(arrays[f"raw.{rest}"]).double()
            yield name, difference(bounds.normalize(raw), array), FLOAT64
        elif kind == "resized_uint8":
            picture = torch.from_numpy(arrays[f"raw.{rest}"])
            picture = picture if picture.dim() == 4 else picture[None]
            got = resize_with_pad(picture, (size, size)).numpy().reshape(array.shape)
            yield name, difference(got, array), EXACT
        elif kind == "state_bins":
            yield name, difference(state_bins(arrays["norm.state"]), array), EXACT
        elif kind == "unnorm" and rest.endswith("actions") and f"sample.{rest}" in want:
            sample = want[f"sample.{rest}"][..., : array.shape[-1]].double()
            yield name, difference(action.unnormalize(sample), array), 1e-6
    for index, case in enumerate(json.loads((folder / "tokenize.json").read_text())):
        numbers = None if case["state"] is None else np.array(case["state"])
        text = clean_text(case["prompt"]) if numbers is None else prompt_text(case["prompt"], numbers)
        same = text == (case["cleaned"] if numbers is None else case["full_text"])
        yield f"tokenize.{index}.text", float(not same), EXACT
        got = tokenize(tokenizer, case["prompt"], numbers, case["max_len"])
        padded = got + [0] * (len(case["ids"]) - len(got))
        yield f"tokenize.{index}.ids", difference(padded, case["ids"]), EXACT
        yield f"tokenize.{index}.mask", difference([i < len(got) for i in range(len(padded))], case["mask"]), EXACT


# -- OpenVLA-OFT -----------------------------------------------------------------------------------------------------


def compare_openvla_oft(folder: Path) -> Iterator[Comparison]:
    """All comparisons of an OpenVLA-OFT folder."""
    meta = json.loads((folder / "meta.json").read_text())
    dims = meta["dims"]
    given, want = load_file(folder / "inputs.safetensors"), Recorded(load_file(folder / "outputs.safetensors"))
    samples = 1 + max(int(name.split(".")[1]) for name in given if name.startswith("image."))
    scenarios = [name for name in dict.fromkeys(name.split(".")[0] for name in want) if name != "sft"]
    for scenario in scenarios:
        yield from _oft_scenario(folder, meta, scenario, samples, given, want)
    yield from _oft_preprocessing(folder, meta, samples, given)
    report_rest(want)

    with np.load(folder / "action_tokenizer.npz") as arrays:
        size = dims["text_vocab"]
        policy = _oft_policy(folder, meta, scenarios[0], samples, given)
        ids = torch.from_numpy(arrays[f"v{size}.ids"])
        tokens = (ids - (size - NUM_BINS)).clamp(0, NUM_BINS - 1)
        want_actions = arrays[f"v{size}.ids_to_actions"]
        got = policy.tokenize_actions(torch.from_numpy(arrays[f"v{size}.actions"])) + size - NUM_BINS
        yield f"action_tokenizer.v{size}.action_ids", difference(got, arrays[f"v{size}.action_ids"]), EXACT
        yield f"action_tokenizer.v{size}.ids_to_actions", difference(policy.bin_centers[tokens], want_actions), 1e-6


def _oft_policy(
    folder: Path, meta: dict[str, Any], scenario: str, samples: int, given: dict[str, Tensor]
) -> OpenVLAOFT:
    dims = meta["dims"]
    model = ModelConfig(
        name="openvla_oft",
        checkpoint=str(folder),
        unnorm_key=meta["unnorm_keys"]["dataset_statistics_json"].removesuffix("_no_noops"),
        num_action_chunks=dims["num_action_chunk"],
        temperature=meta["temperature"],
        options={
            "dino_heads": dims["dino"]["num_heads"],
            "siglip_heads": dims["siglip"]["num_heads"],
            "use_proprio": "proprio" in scenario,
            "keep_stop_token": "stop_masked" not in scenario,  # not attended is the same as not there
        },
    )
    sizes = {"image": dims["image_size"], "state": dims["proprio_dim"], "action": dims["action_dim"]}
    spec = environment(sizes, 1 + ("two_images" in scenario), samples)
    space, stop = dims["empty_token_id"], dims["stop"]
    tokenizer = TextTokenizer(encode=lambda _: [], bos_id=dims["bos"], eos_id=stop, space_id=space)
    policy: OpenVLAOFT = load_policy(folder, model, spec, OpenVLAOFT, tokenizer)
    policy.set_prompts(_oft_prompts(samples, given, space), stop_id=stop)
    return policy


def _oft_prompts(samples: int, given: dict[str, Tensor], space: int) -> list[list[int]]:
    prompts = [given[f"prompt.{i}.input_ids"][0].tolist() for i in range(samples)]
    return [prompt if prompt[-1] == space else [*prompt, space] for prompt in prompts]


def _oft_scenario(
    folder: Path, meta: dict[str, Any], scenario: str, samples: int, given: dict[str, Tensor], want: Recorded
) -> Iterator[Comparison]:
    policy = _oft_policy(folder, meta, scenario, samples, given)
    dims, config = meta["dims"], policy.config
    size = (config.image_size, config.image_size)
    cameras = ("primary", "wrist")[: 1 + ("two_images" in scenario)]
    pictures = [
        [resize(given[f"image.{i}.{c}_uint8"][None], size, "bicubic")[0] for c in cameras] for i in range(samples)
    ]
    obs = Observation(
        images=torch.stack([torch.stack(row) for row in pictures]),
        state=torch.stack([given[f"proprio.{i}.raw"] for i in range(samples)]).float(),
        task=torch.arange(samples),
    )
    with torch.no_grad():
        hidden = policy.action_hidden_states(obs)
        logits = policy.language_model.lm_head(hidden)
        bins = policy.action_logits(obs)
        logprobs = (bins / policy.temperature).log_softmax(-1)
        scale = f"T{policy.temperature}"
        shape = (dims["num_action_chunk"], dims["action_dim"])
        normalized = policy.bin_centers[bins.argmax(-1)].double().view(samples, *shape)
        close = {
            "action_hidden_states": hidden,
            "logits": logits,
            "logits_action_ids": bins,
            f"logp_{scale}": logprobs,
            f"entropy_{scale}": -(logprobs.exp() * logprobs).sum(-1),
            f"greedy_logp_{scale}": logprobs.max(-1).values,
        }
        equal = {
            "greedy_token_ids": bins.argmax(-1) + config.first_action_id,
            "greedy_token_ids_full_vocab": logits.argmax(-1),
        }
        if scenario == "single" and "sft.logits_action_ids" in want:  # the same sequences, padded on the other side
            yield from want.to(bins, "sft.logits_action_ids", FP32)
        for i in range(samples):
            place = f"{scenario}.{i}."
            for values, tolerance in ((close, FP32), (equal, EXACT)):
                for name, value in values.items():
                    yield from want.to(value[i : i + 1], place + name, tolerance)
            yield from want.to(normalized[i], f"{place}normalized_actions", FP32)
            if (tokens := want.get(f"{place}sampled_token_ids")) is not None:
                want.compared.add(f"{place}sampled_token_ids")
                record = {"tokens": (tokens - config.first_action_id).view(1, *shape).to(torch.uint8)}
                row = Observation(images=obs.images[i : i + 1], state=obs.state[i : i + 1], task=obs.task[i : i + 1])
                sampled, _ = policy(row, record)
                yield from want.to(sampled.flatten(1), f"{place}sampled_logp_{scale}", FP32)
            keys = meta["unnorm_keys"]
            for name, key in (
                ("unnormalized_actions", keys["dataset_statistics_json"]),
                (f"unnormalized_actions_{keys['config_json']}", keys["config_json"]),
            ):
                bounds = read_openvla_statistics(folder, key).action
                yield from want.to(bounds.unnormalize(normalized[i]), place + name, FP32)
            yield from _oft_inside(policy, f"{place}", i, obs, want)


def _oft_inside(policy: OpenVLAOFT, place: str, i: int, obs: Observation, want: Recorded) -> Iterator[Comparison]:
    """What lies between pictures and logits, of one sample without padding."""
    prompts, stop = policy.prompts, policy.stop_id
    policy.set_prompts([prompts[i]], stop_id=stop)
    row = Observation(images=obs.images[i : i + 1], state=obs.state[i : i + 1], task=torch.zeros(1, dtype=torch.int64))
    features = policy.vision_backbone(row.images.flatten(0, 1))
    projected = policy.projector(features)
    got = {
        "vision_features": features.flatten(0, 1)[None],
        "projected_patch_embeddings": projected.flatten(0, 1)[None],
        "multimodal_embeddings": policy.embed(row),
    }
    if policy.proprio_projector is not None:
        assert policy.statistics is not None
        assert policy.statistics.state is not None
        state = policy.statistics.state.normalize(row.state, clip=True)
        got |= {"proprio_normalized": state, "proprio_token": policy.proprio_projector(state)}
    for name, value in got.items():
        yield from want.to(value, place + name, FP32)
    policy.set_prompts(prompts, stop_id=stop)


def _oft_preprocessing(
    folder: Path, meta: dict[str, Any], samples: int, given: dict[str, Tensor]
) -> Iterator[Comparison]:
    policy = _oft_policy(folder, meta, "", samples, given)
    assert policy.statistics is not None
    assert policy.statistics.state is not None
    size = (policy.config.image_size,) * 2
    for i in range(samples):
        for camera in ("primary", "wrist"):
            raw = given[f"image.{i}.{camera}_uint8"][None]
            if (resized := given.get(f"image.{i}.{camera}_resized_uint8")) is not None:
                name = f"image.{i}.{camera}_resized_uint8"
                yield name, difference(resize(raw, size, "bicubic")[0], resized), EXACT
            pixels = torch.cat((*policy.vision_backbone.preprocess(raw),), dim=1)
            name = f"image.{i}.{camera}_pixel_values"
            if name in given:
                yield name, difference(pixels, given[name]), FP32
        state = policy.statistics.state.normalize(given[f"proprio.{i}.raw"].double(), clip=True)
        yield f"proprio.{i}.normalized", difference(state, given[f"proprio.{i}.normalized"]), FLOAT64


def report_rest(want: Recorded) -> None:
    """Say which recorded outputs were compared with nothing."""
    rest = sorted(set(want) - want.compared)
    if rest:
        sys.stderr.write(f"not compared: {', '.join(rest)}\n")


def compare(folder: Path) -> Iterator[Comparison]:
    """All comparisons of a folder, of whichever of the models."""
    config = json.loads((folder / "config.json").read_text())
    return compare_openvla_oft(folder) if config.get("model_type") == "openvla" else compare_pi05(folder)


def main(arguments: list[str]) -> int:
    """Print the comparisons; 1 if one is beyond its tolerance."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python tests/golden.py FOLDER\n")
        return 2
    torch.set_num_threads(1)
    worst = 0
    for name, value, tolerance in compare(Path(arguments[0])):
        sys.stdout.write(
            json.dumps({"name": name, "max_abs_diff": min(value, sys.float_info.max), "tolerance": tolerance}) + "\n"
        )
        worst |= not value <= tolerance
    return int(worst)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
