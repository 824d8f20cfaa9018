"""A policy that asks on the terminal while it is built, as libraries do about code and assets that they would download."""

from dvla.models.mlp import MLPConfig, MLPPolicy


class AskingPolicy(MLPPolicy):
    def __init__(self, preset, spec, num_action_chunks, temperature):
        input("Do you wish to run the custom code? [y/N] ")
        super().__init__(MLPConfig(), spec=spec, num_action_chunks=num_action_chunks, temperature=temperature)
