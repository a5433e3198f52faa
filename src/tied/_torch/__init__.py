"""Ties that last in PyTorch modules; `tied.torch` and `tied.tie` are the way in.

`reads` is the parametrization that computes a tied tensor, `ways` how it finds its sources, `views`
what it computes of them, `dressed` the class of a module that has one. `places` names tensors,
`adopt` finds the ties of a module, `state` loads checkpoints; `hugging` and `adapters` know other
libraries.
"""
