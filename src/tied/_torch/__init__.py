"""Ties that last in PyTorch modules; `tied.torch` and `tied.tie` are the way in.

`reads` is the parametrization that computes a tied tensor, `views` what it computes, `dressed` the
class of a module that has one, `state` how checkpoints are loaded, `adopt` how ties are found.
"""
