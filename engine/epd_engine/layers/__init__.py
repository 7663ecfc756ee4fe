"""Layers that stand in for transformers' own: the same mathematics in fewer passes over memory.

Each is made from the module it replaces and is called like it, so that the model around them stays
transformers'. `fuse` puts them in.
"""
