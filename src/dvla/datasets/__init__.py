"""Datasets of demonstrations, on disk."""
