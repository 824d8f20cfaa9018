"""Policies for other programs."""
