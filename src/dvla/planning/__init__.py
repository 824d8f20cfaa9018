"""Plans a run before it is paid for: what the lanes will do, in simulated time, and what that takes of memory and links."""
