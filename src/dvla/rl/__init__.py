"""Pure rules and math of the algorithm: no threads, no clock, no process groups."""
