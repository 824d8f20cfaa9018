"""The four threads of a rank: sampling, inference, grpo, param_dist."""
