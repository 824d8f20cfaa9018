"""What surrounds the lanes: process groups, devices, run folder, checkpoints, stopping."""
