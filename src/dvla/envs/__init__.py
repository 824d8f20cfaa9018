"""Simulators: the environment protocol, its adapters and the worker processes that run them."""
