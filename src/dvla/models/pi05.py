"""pi0.5: a vision-language prefix, and an action expert that turns noise into a chunk of actions by flow matching.

The prefix (pictures, then prompt) never sees the actions, so it is computed once: what the expert needs of it are the keys
and values of each layer. The expert then runs once per denoising step; to find a recorded log-probability again takes one
prefix pass and one expert pass, whatever the number of steps.

Cameras an environment does not have are left out of the sequence. That changes nothing: their tokens would be masked, and
masked tokens do not advance the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm, GemmaRotaryEmbedding, GemmaTextScaledWordEmbedding

from dvla.envs.protocol import EnvSpec
from dvla.models.normalization import Bounds, Statistics
from dvla.models.pi05_config import CAMERA_SLOTS, Pi05Config
from dvla.models.pi05_init import initialise_from_scratch
from dvla.models.pi05_layers import AdaptiveRMSNorm, ExpertLayer, KeyValue, PrefixLayer
from dvla.models.pi05_prompt import prompt_text, tokenize
from dvla.models.policy import Decision, Observation, RecordField
from dvla.models.precision import at_least_float32
from dvla.models.resize import resize_with_pad
from dvla.models.tokenizer import TextTokenizer, build_tokenizer, text_tokenizer
from dvla.rl.flow import gaussian_entropy, gaussian_logprob, noise_std, ode_step, sde_step, step_times
from dvla.rl.noise import normal, uniform

_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0  # of the time embedding's waves
_START, _STEP, _INDEX = 0, 1, 2  # noise streams of one decision
_TIME_POWER, _MIN_TIME = 1.5, 1e-3  # training times: Beta(1.5, 1), squeezed to begin at the latter


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Sines, then cosines, (B, width) float64 of times (B,): `width` / 2 waves of geometric periods."""
    period = _MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** torch.linspace(
        0.0, 1.0, width // 2, dtype=torch.float64, device=time.device
    )
    angle = 2.0 * math.pi * time.double()[:, None] / period
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the expert needs of pictures and prompt."""

    layers: list[KeyValue]
    mask: Tensor | None
    """(B, P) bool, True where there is a token; None when there is one everywhere."""
    num_tokens: Tensor
    """(B,) int64, tokens that are there."""
    feature: Tensor
    """(B, hidden_size): mean over these tokens of what enters the last layer, which computes keys and values only."""

    def repeated(self, times: int) -> Prefix:
        """The same for every row `times` in a row."""
        return Prefix(
            [(key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)) for key, value in self.layers],
            None if self.mask is None else self.mask.repeat_interleave(times, 0),
            self.num_tokens.repeat_interleave(times),
            self.feature.repeat_interleave(times, 0),
        )


def noise_head(width: int, action_dim: int) -> nn.Sequential:
    """Perceptron from the expert's output to Flow-Noise's standard deviations."""
    sizes = [width, max(width // 8, action_dim), max(width // 16, action_dim)]
    hidden = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], action_dim))


class Pi05(nn.Module):
    """The policy; implements `dvla.models.policy.Policy`.

    Samples live in the space the model was trained in: normalised actions, `action_dim` wide, `action_horizon` long.
    Log-probabilities are of what is executed: the first steps, the environment's own elements.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor

    def __init__(
        self,
        config: Pi05Config,
        *,
        spec: EnvSpec,
        num_action_chunks: int,
        temperature: float,
        tokenizer: TextTokenizer | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        """Build the model with random weights.

        Args:
            config: Sizes and switches.
            spec: The environment: cameras, state and action sizes, and the instructions.
            num_action_chunks: Control steps K of one decision, at most `config.action_horizon`.
            temperature: Must be 1: the noise is set by `config.noise_level`.
            tokenizer: A checkpoint's tokenizer; by default one is trained on the instructions.
            statistics: A checkpoint's normalisation; by default actions and state are used as they are.
        """
        super().__init__()
        if not 1 <= len(spec.cameras) <= CAMERA_SLOTS:
            raise ValueError(f"env.cameras: pi05 sees 1 to {CAMERA_SLOTS} cameras, {spec.name} has {len(spec.cameras)}")
        if num_action_chunks > config.action_horizon:
            raise ValueError(
                f"model.num_action_chunks={num_action_chunks} is more than the {config.action_horizon} actions the model "
                "predicts at once (model.options.action_horizon)"
            )
        if spec.action_dim > config.action_dim:
            raise ValueError(f"model: {spec.name} has {spec.action_dim} action elements, the model {config.action_dim}")
        if temperature != 1:
            raise ValueError("model.temperature must be 1: pi05's noise is set by model.options.noise_level")
        height, width = spec.image_size
        if max(height, width) > config.image_size * min(height, width):
            raise ValueError(f"env.image_size: pictures of {height} x {width} become nothing at the model's size")
        if config.discrete_state_input and statistics is not None and statistics.state is None:
            raise ValueError(
                f"model.options.discrete_state_input: the statistics {statistics.key!r} have none of the state"
            )
        if config.discrete_state_input and not spec.state_dim:
            raise ValueError(f"model.options.discrete_state_input: {spec.name} has no proprioceptive state")
        if statistics is not None:
            statistics = _fitting(statistics, config, spec)
        self.config, self.statistics = config, statistics
        self.num_action_chunks, self.env_action_dim = num_action_chunks, spec.action_dim
        self.num_imitated_steps = config.action_horizon
        self.value_feature_size = config.hidden_size
        horizon = (config.action_horizon, config.action_dim)
        if config.sampler == "flow_sde":
            self.record_spec = {
                "x_from": RecordField(horizon, torch.float32),
                "x_to": RecordField(horizon, torch.float32),
                "denoise_step": RecordField((), torch.int64),
            }
        else:
            self.record_spec = {"chain": RecordField((config.num_denoise_steps + 1, *horizon), torch.float32)}
        if config.discrete_state_input:
            self.record_spec |= {
                "prompt_ids": RecordField((config.max_token_len,), torch.int32),
                "prompt_length": RecordField((), torch.int64),
            }

        self.vision = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=config.vision_hidden_size,
                intermediate_size=config.vision_mlp_size,
                num_hidden_layers=config.vision_layers,
                num_attention_heads=config.vision_heads,
                image_size=config.image_size,
                patch_size=config.patch_size,
                vision_use_head=False,
                attn_implementation="sdpa",
            )
        )
        prefix, expert = (
            GemmaConfig(
                hidden_size=width,
                intermediate_size=mlp_size,
                num_attention_heads=config.heads,
                num_key_value_heads=1,
                head_dim=config.head_dim,
                rms_norm_eps=1e-6,
                hidden_act="gelu_pytorch_tanh",
            )
            for width, mlp_size in (
                (config.hidden_size, config.mlp_size),
                (config.expert_hidden_size, config.expert_mlp_size),
            )
        )
        self._rotary_config = prefix
        self.projector = nn.Linear(config.vision_hidden_size, config.hidden_size)
        self.embed_tokens = GemmaTextScaledWordEmbedding(
            config.vocab_size, config.hidden_size, None, embed_scale=config.hidden_size**0.5
        )
        layers = [PrefixLayer(prefix) for _ in range(config.layers)]
        self.prefix_layers = nn.ModuleList(layers)
        self.prefix_norm = GemmaRMSNorm(config.hidden_size, eps=1e-6)
        self.expert_layers = nn.ModuleList([ExpertLayer(expert) for _ in range(config.layers)])
        width = config.expert_hidden_size
        self.expert_norm = AdaptiveRMSNorm(width, 1e-6)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)
        self.noise_head = noise_head(width, config.action_dim) if config.sampler == "flow_noise" else None

        # Only keys and values of the last prefix layer are used; the rest of it is dead weight that checkpoints hold.
        last = layers[-1]
        for dead in (
            last.self_attn.q_proj,
            last.self_attn.o_proj,
            last.mlp,
            last.post_attention_layernorm,
            self.prefix_norm,
        ):
            dead.requires_grad_(False)
        initialise_from_scratch(self)
        self._instructions = spec.instructions
        if tokenizer is None:
            sample = np.zeros(1) if config.discrete_state_input else None
            texts = [prompt_text(instruction, sample) + "\n -0123456789" for instruction in spec.instructions]
            tokenizer = text_tokenizer(build_tokenizer(texts, config.vocab_size))
        self.tokenizer = tokenizer
        prompts = [tokenize(tokenizer, text, None, config.max_token_len) for text in spec.instructions]
        self.set_prompts(prompts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pi05:
        """Move or cast the weights; the constants stay float32, and are right even when the model comes from `meta`."""
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def set_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Replace the tokenised prompts, one per task (unused while the state is part of the prompt)."""
        self.prompts = [list(prompt) for prompt in prompts]
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute all constants anew, on the device of the weights: they are in no checkpoint."""
        device = self.embed_tokens.weight.device
        self.rotary = GemmaRotaryEmbedding(self._rotary_config).to(device)
        scale = torch.tensor(self.embed_tokens.scalar_embed_scale, device=device)
        self.embed_tokens.register_buffer("embed_scale", scale, persistent=False)
        positions = torch.arange(self.vision.embeddings.num_positions, device=device).expand(1, -1)
        self.vision.embeddings.register_buffer("position_ids", positions, persistent=False)
        longest = max(map(len, self.prompts))
        rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in self.prompts]
        self.register_buffer("prompt_ids", torch.tensor(rows, device=device), persistent=False)
        lengths = torch.tensor([len(prompt) for prompt in self.prompts], device=device)
        self.register_buffer("prompt_lengths", lengths, persistent=False)
        self._action_bounds = None if self.statistics is None else self.statistics.action.to(device)
        self._is_padded = len({len(prompt) for prompt in self.prompts}) > 1

    # -- the policy ----------------------------------------------------------------------------------------------------

    def act(self, obs: Observation, keys: Tensor, *, greedy: bool = False) -> Decision:
        """Sample one action chunk per observation, see `dvla.models.policy.Policy.act`; greedy is the ODE from noise."""
        config = self.config
        batch, num_steps = obs.state.shape[0], config.num_denoise_steps
        record = self._prompts_with_state(obs) if config.discrete_state_input else {}
        with torch.inference_mode():
            prefix = self.encode_observation(obs, record)
            x = normal(keys, config.action_horizon, config.action_dim, stream=_START)
            noisy_step = (uniform(keys, stream=_INDEX * 2) * num_steps).long()  # one of them, drawn per sample
            x_from, x_to, chain = x, x, [x]
            logprobs = gaussian_logprob(x, torch.zeros_like(x), torch.ones_like(x))
            for step in range(num_steps):
                time = step_times(torch.full((batch,), step, device=x.device), num_steps)
                hidden = self.denoise(prefix, x, time)
                velocity = self.velocity(hidden)
                following = ode_step(x, velocity, num_steps)
                if not greedy and self.noise_head is not None:
                    std = noise_std(at_least_float32(self.noise_head(hidden)))
                    sample = following + std * normal(keys, *x.shape[1:], stream=_INDEX + 1 + step)
                    logprobs = logprobs + gaussian_logprob(sample, following, std)
                    following = sample
                elif not greedy:
                    mean, std = sde_step(x, velocity, time, num_steps, config.noise_level)
                    sample = mean + std * normal(keys, *x.shape[1:], stream=_STEP)
                    is_noisy = (noisy_step == step).view(-1, 1, 1)
                    logprobs = torch.where(is_noisy, gaussian_logprob(sample, mean, std), logprobs)
                    following = torch.where(is_noisy, sample, following)
                    x_from, x_to = torch.where(is_noisy, x, x_from), torch.where(is_noisy, following, x_to)
                x = following
                chain.append(x)
            if self.noise_head is not None:
                record |= {"chain": torch.stack(chain, dim=1)}
            else:
                record |= {"x_from": x_from, "x_to": x_to, "denoise_step": noisy_step}
            executed = self._executed(x)
            if self._action_bounds is not None:
                executed = self._action_bounds.unnormalize(executed)
        # Copies, so that what is returned are ordinary tensors.
        return Decision(
            actions=executed.clamp(-1, 1).float().clone(),
            logprobs=self._executed(logprobs).float().clone(),
            record={name: value.clone() for name, value in record.items()},
        )

    def forward(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of recorded samples, see `dvla.models.policy.Policy.forward`."""
        return self.evaluate(obs, record)[:2]

    def value_feature(self, obs: Observation) -> Tensor:
        """What the prefix has made of pictures and prompt, (B, hidden_size)."""
        record = self._prompts_with_state(obs) if self.config.discrete_state_input else {}
        return self.encode_observation(obs, record).feature

    def evaluate(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The same and the value feature, see `dvla.models.policy.Assessor.evaluate`."""
        num_steps = self.config.num_denoise_steps
        prefix = self.encode_observation(obs, record)
        if self.noise_head is None:
            time = step_times(record["denoise_step"], num_steps)
            velocity = self.velocity(self.denoise(prefix, record["x_from"], time))
            mean, std = sde_step(record["x_from"], velocity, time, num_steps, self.config.noise_level)
            logprobs = self._executed(gaussian_logprob(record["x_to"], mean, std))
            return logprobs.clone(), gaussian_entropy(std).expand_as(logprobs).clone(), prefix.feature
        # The chain is known, so its transitions need not wait for each other: they are rows of one batch.
        chain = record["chain"]
        batch = chain.shape[0]
        start, end = chain[:, :-1].flatten(0, 1), chain[:, 1:].flatten(0, 1)
        time = step_times(torch.arange(num_steps, device=chain.device), num_steps).repeat(batch)
        hidden = self.denoise(prefix.repeated(num_steps), start, time)
        std = noise_std(at_least_float32(self.noise_head(hidden)))
        transitions = gaussian_logprob(end, ode_step(start, self.velocity(hidden), num_steps), std)
        prior = gaussian_logprob(chain[:, 0], torch.zeros_like(chain[:, 0]), torch.ones_like(chain[:, 0]))
        logprobs = prior + transitions.unflatten(0, (batch, num_steps)).sum(1)
        entropy = gaussian_entropy(std).unflatten(0, (batch, num_steps)).mean(1)
        return self._executed(logprobs).clone(), self._executed(entropy).clone(), prefix.feature

    def fsdp_units(self) -> list[nn.Module]:
        """The prefix in parts; the expert stays with the root, because every denoising step needs it."""
        return [*self.vision.encoder.layers, self.embed_tokens, *self.prefix_layers]

    def freezable(self) -> dict[str, list[nn.Module]]:
        """Parts that ``model.freeze`` can name."""
        vlm = [self.vision, self.projector, self.embed_tokens, self.prefix_layers, self.prefix_norm]
        return {"vision": [self.vision, self.projector], "vlm": vlm}

    # -- its parts -----------------------------------------------------------------------------------------------------

    def encode_observation(self, obs: Observation, record: dict[str, Tensor]) -> Prefix:
        """The prefix of observations; prompts with state come from `record`."""
        if not self.config.discrete_state_input:
            mask = (
                self._token_mask(self.prompt_lengths[obs.task], self.prompt_ids.shape[1]) if self._is_padded else None
            )
            return self.encode(obs.images, None, self.prompt_ids[obs.task], mask)
        lengths = record["prompt_length"]
        longest = int(lengths.max())
        return self.encode(
            obs.images, None, record["prompt_ids"][:, :longest].long(), self._token_mask(lengths, longest)
        )

    def encode(self, images: Tensor, image_mask: Tensor | None, ids: Tensor, token_mask: Tensor | None) -> Prefix:
        """Keys and values of pictures and prompt.

        Args:
            images: (B, C, h, w, 3) uint8, in the order of the camera slots.
            image_mask: (B, C) bool, True where there is a picture; None if there always is.
            ids: (B, L) token ids.
            token_mask: (B, L) bool, True where there is a token; None if there always is.
        """
        embedded, mask = self.embed(images, image_mask, ids, token_mask)
        batch, length, _ = embedded.shape
        if mask is None:
            positions = torch.arange(length, device=ids.device).expand(1, -1)
            num_tokens = torch.full((batch,), length, device=ids.device)
            key_mask = None
        else:
            positions, num_tokens, key_mask = mask.cumsum(1) - 1, mask.sum(1), mask[:, None, None, :]
        rotary = self.rotary(embedded, position_ids=positions)
        hidden, layers = embedded, []
        for index, layer in enumerate(self.prefix_layers):
            before = hidden
            hidden, key_value = layer(hidden, rotary, key_mask, index < len(self.prefix_layers) - 1)
            layers.append(key_value)
        if mask is None:
            feature = before.mean(1)
        else:
            feature = before.where(mask[..., None], 0).sum(1) / num_tokens[:, None].to(before.dtype)
        return Prefix(layers, mask, num_tokens, feature)

    def embed(
        self, images: Tensor, image_mask: Tensor | None, ids: Tensor, token_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Input of the prefix layers (B, P, hidden_size), and its mask (B, P) or None; arguments as of `encode`."""
        batch, cameras = images.shape[:2]
        vision = self.projector(self.vision(self.preprocess(images.flatten(0, 1))).last_hidden_state)
        text = self.embed_tokens(ids)
        embedded = torch.cat((vision.view(batch, -1, vision.shape[-1]), text), dim=1)
        if image_mask is None and token_mask is None:
            return embedded, None
        if image_mask is None:
            image_mask = torch.ones(batch, cameras, dtype=torch.bool, device=ids.device)
        if token_mask is None:
            token_mask = torch.ones_like(ids, dtype=torch.bool)
        return embedded, torch.cat((image_mask.repeat_interleave(vision.shape[1], 1), token_mask), dim=1)

    def preprocess(self, images: Tensor) -> Tensor:
        """(N, h, w, 3) uint8 to (N, 3, image_size, image_size) in [-1, 1], in the weights' dtype."""
        pixels = resize_with_pad(images, (self.config.image_size, self.config.image_size)).permute(0, 3, 1, 2)
        return (pixels.float() / 255.0 * 2.0 - 1.0).to(self.projector.weight.dtype)

    def denoise(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """The expert's last hidden states (B, H, expert_hidden_size) for samples (B, H, action_dim) at times (B,)."""
        condition = self.condition(time)
        hidden = self.action_in_proj(x.to(condition.dtype))
        horizon = hidden.shape[1]
        positions = prefix.num_tokens[:, None] + torch.arange(horizon, device=x.device)
        rotary = self.rotary(hidden, position_ids=positions)
        mask = None if prefix.mask is None else F.pad(prefix.mask, (0, horizon), value=True)[:, None, None, :]
        for layer, key_value in zip(self.expert_layers, prefix.layers, strict=True):
            hidden = layer(hidden, condition, rotary, key_value, mask)
        return self.expert_norm(hidden, condition)[0]

    def condition(self, time: Tensor) -> Tensor:
        """What steers the expert's norms at times (B,): (B, expert_hidden_size)."""
        embedded = time_embedding(time, self.config.expert_hidden_size).to(self.time_mlp_in.weight.dtype)
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded))))

    def velocity(self, hidden: Tensor) -> Tensor:
        """Velocity (B, H, action_dim), float32 at least, from the expert's last hidden states."""
        return at_least_float32(self.action_out_proj(hidden))

    def flow_loss(self, prefix: Prefix, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Flow-matching loss per element (B, H, action_dim), of normalised `actions`, `noise` alike and `time` (B,)."""
        t = time.view(-1, 1, 1)
        velocity = self.velocity(self.denoise(prefix, t * noise + (1 - t) * actions, time))
        return (noise - actions - velocity).square()

    def imitation_loss(self, obs: Observation, actions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, None]:
        """Flow-matching loss of demonstrated actions, see `dvla.models.policy.Imitator.imitation_loss`.

        Elements that only the model has are 0 in its actions and do not count, as in lerobot. (openpi lets them count: no
        difference in success could be measured.)

        Args:
            obs: B observations.
            actions: (B, H, A) float32 in the environment's units.
            keys: (B,) int64 noise keys: they decide the noise and the time.

        Returns:
            The loss (B, H, A); the error (B, H, A) of the action that the velocity at that time points to.
        """
        record = self._prompts_with_state(obs) if self.config.discrete_state_input else {}
        prefix = self.encode_observation(obs, record)
        bounds = self._action_bounds
        normalized = actions if bounds is None else bounds.normalize(actions)
        padded = F.pad(normalized, (0, self.config.action_dim - self.env_action_dim))
        noise = normal(keys, *padded.shape[1:], stream=_START)
        # The inverse of that distribution's cumulative one, t ** 1.5.
        time = _MIN_TIME + (1 - _MIN_TIME) * uniform(keys, stream=_INDEX * 2) ** (1 / _TIME_POWER)
        # A copy, because FSDP2 warns of modules that return views.
        loss = self.flow_loss(prefix, padded, noise, time)[..., : self.env_action_dim].clone()
        error = time.view(-1, 1, 1) * loss.detach().sqrt()
        if bounds is not None:
            error = error * torch.where(bounds.mask, 0.5 * bounds.span, 1.0).to(error.dtype)
        return loss, error, None

    def _executed(self, x: Tensor) -> Tensor:
        """What is executed of (B, H, action_dim): (B, K, A)."""
        return x[:, : self.num_action_chunks, : self.env_action_dim]

    def _token_mask(self, lengths: Tensor, longest: int) -> Tensor:
        return torch.arange(longest, device=lengths.device) < lengths[:, None]

    def _prompts_with_state(self, obs: Observation) -> dict[str, Tensor]:
        """Tokenise instruction and state of each observation."""
        state = obs.state.double().cpu()
        if self.statistics is not None and self.statistics.state is not None:
            state = self.statistics.state.normalize(state)
        longest = self.config.max_token_len
        ids = torch.zeros(len(state), longest, dtype=torch.int32)
        lengths = torch.zeros(len(state), dtype=torch.int64)
        for row, (task, values) in enumerate(zip(obs.task.tolist(), state.numpy(), strict=True)):
            tokens = tokenize(self.tokenizer, self._instructions[task], values, longest)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            lengths[row] = len(tokens)
        device = obs.state.device
        return {"prompt_ids": ids.to(device), "prompt_length": lengths.to(device)}


def _fitting(statistics: Statistics, config: Pi05Config, spec: EnvSpec) -> Statistics:
    """The statistics of what the environment has; a publisher may have padded them to the width of the network.

    Raises:
        ConfigError: They are of other actions or states.
    """

    def cut(bounds: Bounds, size: int, what: str) -> Bounds:
        if len(bounds.low) == config.action_dim:
            bounds = bounds.first(size)
        bounds.require_length(size, what)
        return bounds

    action, state = cut(statistics.action, spec.action_dim, "the environment's actions"), statistics.state
    if config.discrete_state_input and state is not None:
        state = cut(state, spec.state_dim, "the environment's states")
    return replace(statistics, action=action, state=state)
