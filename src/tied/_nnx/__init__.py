"""Ties that last in Flax NNX modules."""
