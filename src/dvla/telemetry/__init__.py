"""What a person sees of a run: metrics, trace, terminal, summary."""
