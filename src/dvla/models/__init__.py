"""Policies: the protocol the lanes rely on, and the models that follow it."""
