"""OpenVLA-OFT: a vision-language model that predicts a whole chunk of discrete actions in one parallel pass.

The sequence is ``[BOS] [vision: patches × cameras] [proprio?] [pads] [prompt … "▁"] [placeholders: K·A] [STOP?]``. Attention
is bidirectional over all of it, pads excepted. A placeholder has a zero embedding: only its position tells it which action
element it stands for. Element i is read from the position before placeholder i (next-token shift), so the first one is
read from the lone-space token that ends the prompt.

The blocks are those of `transformers`; what is written here is the assembly. The blocks are called one by one, because
the models' own `forward` would build masks and caches that this model has no use for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from dvla.envs.protocol import EnvSpec
from dvla.models.normalization import Statistics
from dvla.models.openvla_oft_config import NUM_BINS, OpenVLAOFTConfig
from dvla.models.openvla_oft_init import initialise_from_scratch
from dvla.models.openvla_oft_vision import FusedVisionBackbone, ProprioProjector, VisionProjector
from dvla.models.policy import Decision, Observation, RecordField
from dvla.models.precision import at_least_float32
from dvla.models.tokenizer import TextTokenizer, build_tokenizer, text_tokenizer
from dvla.rl.noise import uniform

MIN_UNIT_PARAMETERS = 1_000_000
"""Smaller modules are no FSDP unit of their own: the latency of one more collective outweighs the memory it saves."""


def prompt_text(instruction: str) -> str:
    """The prompt of an instruction; its trailing space becomes the lone "▁"."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut: "


class _LastLayer(LlamaDecoderLayer):
    """The last decoder layer, whose perceptron computes only the rows that are read."""

    def forward(self, hidden_states: Tensor, rows: slice, **attention: object) -> Tensor:
        """(B, S, d) to (B, len(rows), d)."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **attention)
        hidden_states = (hidden_states + attended)[:, rows]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OpenVLAOFT(nn.Module):
    """The policy; implements `dvla.models.policy.Policy`.

    An action element is one of 256 bins. A recorded token is the column within the 256 action ids (0 … 255), which run
    against the action axis: token 255 is the lowest bin, tokens 0 and 1 are both the highest.
    """

    prompt_ids: Tensor
    position_ids: Tensor
    key_mask: Tensor | None
    bin_centers: Tensor

    def __init__(
        self,
        config: OpenVLAOFTConfig,
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
            num_action_chunks: Control steps K of one decision.
            temperature: Divides the logits, in `act` and `forward` alike.
            tokenizer: A checkpoint's tokenizer; by default one is trained on the instructions.
            statistics: A checkpoint's normalisation; by default actions and state are used as they are.
        """
        super().__init__()
        if not spec.cameras:
            raise ValueError(f"model.name: openvla_oft needs images, but {spec.name} has no camera")
        if config.use_proprio and not spec.state_dim:
            raise ValueError(f"model.options.use_proprio: {spec.name} has no proprioceptive state")
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if statistics is not None:
            statistics.action.require_length(spec.action_dim, "the environment's actions")
            if not statistics.action.mask[-1] and spec.gripper_open is None:
                raise ValueError(f"model: the checkpoint commands a gripper, but {spec.name} has none")
        if config.use_proprio and statistics is not None:
            if statistics.state is None:
                raise ValueError(f"model.unnorm_key: the statistics {statistics.key!r} are without proprio")
            statistics.state.require_length(spec.state_dim, "the environment's states")
        self.config, self.statistics = config, statistics
        self._commands_gripper = statistics is not None and not statistics.action.mask[-1]
        self._gripper_open = spec.gripper_open or 0.0
        self.temperature = temperature
        self.num_action_chunks = num_action_chunks
        self.action_dim = spec.action_dim
        self.num_tokens = num_action_chunks * spec.action_dim
        self.num_imitated_steps = num_action_chunks
        self.value_feature_size = config.llm_hidden_size
        self.record_spec = {"tokens": RecordField((num_action_chunks, spec.action_dim), torch.uint8)}

        self.vision_backbone = FusedVisionBackbone(config)
        self.projector = VisionProjector(config.vision_size, config.llm_hidden_size)
        self.proprio_projector = (
            ProprioProjector(spec.state_dim, config.llm_hidden_size) if config.use_proprio else None
        )
        self.language_model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.num_embeddings,
                hidden_size=config.llm_hidden_size,
                intermediate_size=config.llm_mlp_size,
                num_hidden_layers=config.llm_layers,
                num_attention_heads=config.llm_heads,
                pad_token_id=config.vocab_size,
                rms_norm_eps=1e-6,
                is_causal=False,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
        llm = self.language_model.model
        llm.layers[-1] = _LastLayer(llm.config, config.llm_layers - 1)
        initialise_from_scratch(self)
        if tokenizer is None:
            texts = [prompt_text(instruction) for instruction in spec.instructions]
            tokenizer = text_tokenizer(build_tokenizer(texts, config.first_action_id))
        self._num_context = 1 + config.num_patches * len(spec.cameras) + config.use_proprio
        self.tokenizer = tokenizer
        prompts = [_tokenize(tokenizer, instruction) for instruction in spec.instructions]
        self.set_prompts(prompts, stop_id=tokenizer.eos_id)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OpenVLAOFT:
        """Move or cast the weights; the constants stay float32, and are right even when the model comes from `meta`."""
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def set_prompts(self, prompts: Sequence[Sequence[int]], *, stop_id: int) -> None:
        """Replace the tokenised prompts, one per task, each from BOS to the lone space."""
        self.prompts = [list(prompt) for prompt in prompts]
        self.stop_id = stop_id
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute all constants anew, on the device of the weights: they are in no checkpoint."""
        llm = self.language_model.model
        device = llm.embed_tokens.weight.device
        llm.rotary_emb = LlamaRotaryEmbedding(llm.config).to(device)
        self.vision_backbone.reset_buffers()

        # Prompts are padded on the left, to the longest of the run rather than of the batch: so the action slots lie at
        # the same place in every row, and a decision does not depend on which others share its batch.
        longest = max(map(len, self.prompts))
        tail = [self.stop_id] if self.config.keep_stop_token else []
        pads = [longest - len(prompt) for prompt in self.prompts]
        rows = [
            [prompt[0], *[self.config.vocab_size] * pad, *prompt[1:], *tail]
            for prompt, pad in zip(self.prompts, pads, strict=True)
        ]
        self._num_prompt = longest - 1
        self._first_row = self._num_context + longest - 2  # position of the lone space
        length = self._num_context + self._num_prompt + self.num_tokens + len(tail)
        position = torch.arange(length, device=device).expand(len(pads), -1)
        pad = torch.tensor(pads, device=device)[:, None]
        after = position >= self._num_context  # positions behind which pads may lie
        is_token = ~after | (position >= self._num_context + pad)
        # Pads do not count: the tokens after them stand where they would stand without.
        position = (position - pad * after).clamp(min=0)
        is_padded = any(pads)
        self.register_buffer("prompt_ids", torch.tensor(rows, device=device), persistent=False)
        self.register_buffer("position_ids", position if is_padded else position[:1], persistent=False)
        # Masked attention is slower, so tasks of equal length, and a single task, go without.
        self.register_buffer("key_mask", is_token[:, None, None, :] if is_padded else None, persistent=False)

        self._action_bounds = self._state_bounds = None
        if self.statistics is not None:
            self._action_bounds = self.statistics.action.to(device)
            if self.statistics.state is not None:
                self._state_bounds = self.statistics.state.to(device)

        # 255 intervals lie between 256 edges; the token without an interval of its own shares its neighbour's.
        interval = (NUM_BINS - 1 - torch.arange(NUM_BINS, device=device)).clamp(max=NUM_BINS - 2)
        self.register_buffer("bin_centers", (2 * interval + 1) / (NUM_BINS - 1) - 1, persistent=False)

    def act(self, obs: Observation, keys: Tensor, *, greedy: bool = False) -> Decision:
        """Sample one action chunk per observation, see `dvla.models.policy.Policy.act`."""
        with torch.inference_mode():
            logprobs = self._bin_logprobs(obs)
        # Outside again, so that what is returned are ordinary tensors. Inverse transform sampling: scaling by the last
        # entry, which is 1 but for rounding, keeps the target within the table.
        cdf = logprobs.exp().cumsum(-1)
        target = uniform(keys, *logprobs.shape[1:3]).unsqueeze(-1) * cdf[..., -1:]
        tokens = logprobs.argmax(-1, keepdim=True) if greedy else torch.searchsorted(cdf, target)
        actions = self.bin_centers[tokens.squeeze(-1)]
        if greedy and self.config.greedy_decoding == "mean":
            actions = (logprobs.exp() * self.bin_centers).sum(-1)
        return Decision(
            actions=self.to_environment(actions),
            logprobs=logprobs.gather(-1, tokens).squeeze(-1),
            record={"tokens": tokens.squeeze(-1).to(torch.uint8)},
        )

    def tokenize_actions(self, actions: Tensor) -> Tensor:
        """Tokens (…) int64 in 0 … 255 of normalised actions (…), which are clipped to [-1, 1]."""
        edges = torch.from_numpy(np.linspace(-1.0, 1.0, NUM_BINS)).to(actions.device)
        return NUM_BINS - torch.bucketize(actions.double().clamp(-1, 1), edges, right=True)

    def to_environment(self, actions: Tensor) -> Tensor:
        """Actions (B, K, A) in [-1, 1] as the environment takes them, from the model's, which are normalised.

        The data sets these models are trained on give the gripper as 0 (closed) to 1 (open), without normalisation. It is
        commanded to one of the two.
        """
        if self._action_bounds is None:
            return actions
        actions = self._action_bounds.unnormalize(actions)
        if self._commands_gripper:
            command = torch.where(actions[..., -1:] > 0.5, self._gripper_open, -self._gripper_open)
            actions = torch.cat((actions[..., :-1], command), dim=-1)
        return actions.clamp(-1, 1)

    def from_environment(self, actions: Tensor) -> Tensor:
        """Actions (B, K, A) in the model's units, from the environment's: the inverse of `to_environment`."""
        if self._action_bounds is None:
            return actions
        normalized = self._action_bounds.normalize(actions)
        if self._commands_gripper:
            is_open = (actions[..., -1:] * self._gripper_open > 0).to(normalized.dtype)
            normalized = torch.cat((normalized[..., :-1], is_open), dim=-1)
        return normalized

    def imitation_loss(
        self, obs: Observation, actions: Tensor, keys: Tensor, *, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy over the bins of demonstrated actions, see `dvla.models.policy.Imitator.imitation_loss`.

        At a temperature of 1 and without smoothing it is minus the log-probability that `forward` finds for these bins.

        Args:
            obs: B observations.
            actions: (B, K, A) float32 in the environment's units.
            keys: Unused: nothing is drawn.
            label_smoothing: Share of the target that is spread evenly over all bins.
        """
        logprobs = self._bin_logprobs(obs)
        tokens = self.tokenize_actions(self.from_environment(actions))
        loss = -logprobs.gather(-1, tokens.unsqueeze(-1)).sum(-1)
        if label_smoothing:
            loss = (1 - label_smoothing) * loss - label_smoothing * logprobs.mean(-1)
        best = self.bin_centers[logprobs.detach().argmax(-1)]
        error = (self.to_environment(best) - actions).abs()
        return loss, error, best == self.bin_centers[tokens]

    def forward(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of recorded tokens, see `dvla.models.policy.Policy.forward`."""
        return self.evaluate(obs, record)[:2]

    def evaluate(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The same and the value feature, see `dvla.models.policy.Assessor.evaluate`."""
        hidden = self.action_hidden_states(obs)
        logprobs = self._logprobs_of(self._logits_of(hidden))
        tokens = record["tokens"].long().unsqueeze(-1)
        # A sum over one element, not a squeeze, and a copy: FSDP2 warns of modules that return views.
        return logprobs.gather(-1, tokens).sum(-1), -(logprobs.exp() * logprobs).sum(-1), hidden[:, 0].clone()

    def value_feature(self, obs: Observation) -> Tensor:
        """Last hidden state (B, llm_hidden_size) of the lone space, from which the first action element is read."""
        return self.action_hidden_states(obs)[:, 0].clone()

    def fsdp_units(self) -> list[nn.Module]:
        """The large live blocks, and the head."""
        candidates = [
            *self.vision_backbone.live_blocks,
            self.projector,
            self.language_model.model.embed_tokens,
            *self.language_model.model.layers,
            self.language_model.lm_head,
        ]
        return [m for m in candidates if sum(p.numel() for p in m.parameters()) >= MIN_UNIT_PARAMETERS]

    def freezable(self) -> dict[str, list[nn.Module]]:
        """Parts that ``model.freeze`` can name."""
        llm = self.language_model
        return {
            "vision": [self.vision_backbone],
            "projector": [self.projector],
            "llm": [llm],
            "vocabulary": [llm.model.embed_tokens, llm.lm_head],
        }

    def embed(self, obs: Observation) -> Tensor:
        """Input of the language model: (B, S, llm_hidden_size), in the weights' dtype."""
        # Flat, because a linear layer returns a view otherwise, see `forward`.
        vision = self.projector(self.vision_backbone(obs.images.flatten(0, 1)).flatten(0, 1))
        batch, width = obs.images.shape[0], vision.shape[-1]
        text = self.language_model.model.embed_tokens(self.prompt_ids[obs.task])
        prompt_end = 1 + self._num_prompt
        parts = [text[:, :1], vision.view(batch, -1, width)]
        if self.proprio_projector is not None:
            state = obs.state if self._state_bounds is None else self._state_bounds.normalize(obs.state).clamp(-1, 1)
            parts.append(self.proprio_projector(state.to(text.dtype)).unsqueeze(1))
        parts += [text[:, 1:prompt_end], text.new_zeros(batch, self.num_tokens, width), text[:, prompt_end:]]
        return torch.cat(parts, dim=1)

    def action_logits(self, obs: Observation) -> Tensor:
        """Logits (B, K·A, 256) float32 of the action bins, before temperature."""
        return self._logits_of(self.action_hidden_states(obs))

    def _logits_of(self, hidden: Tensor) -> Tensor:
        first = self.config.first_action_id
        logits = self.language_model.lm_head(hidden)
        return at_least_float32(logits[..., first : first + NUM_BINS])

    def action_hidden_states(self, obs: Observation) -> Tensor:
        """What the head reads: (B, K·A, llm_hidden_size), after the final norm."""
        llm = self.language_model.model
        hidden = self.embed(obs)
        positions, mask = self.position_ids, self.key_mask
        if mask is not None:
            positions, mask = positions[obs.task], mask[obs.task]
        attention = {
            "attention_mask": mask,
            "position_embeddings": llm.rotary_emb(hidden, position_ids=positions),
            "is_causal": False,  # without a mask the layers would be causal otherwise
        }
        for layer in llm.layers[:-1]:
            hidden = layer(hidden, **attention)
        rows = slice(self._first_row, self._first_row + self.num_tokens)
        return llm.norm(llm.layers[-1](hidden, rows, **attention))

    def _bin_logprobs(self, obs: Observation) -> Tensor:
        """Log-probabilities (B, K, A, 256) float32 of the action bins."""
        return self._logprobs_of(self.action_logits(obs))

    def _logprobs_of(self, logits: Tensor) -> Tensor:
        logits = logits / self.temperature
        return logits.log_softmax(-1).view(-1, self.num_action_chunks, self.action_dim, NUM_BINS)


def _tokenize(tokenizer: TextTokenizer, instruction: str) -> list[int]:
    """Token ids of a prompt, from BOS to the lone space."""
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt_text(instruction))]
    return ids if ids[-1] == tokenizer.space_id else [*ids, tokenizer.space_id]
