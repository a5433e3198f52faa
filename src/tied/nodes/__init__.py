"""How the types that come with Python and with frameworks come apart, a file for each kind.

Each file has a `find(cls)`, which returns whether it knows the type, and the kind of it. To add a
framework, write a file and name it in `frameworks.py`.
"""
