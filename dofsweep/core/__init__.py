"""The mathematics: kernels, spectra, plans, features, attention and losses, in torch alone.

Nothing here knows of files, databases, clusters or models. Every fast path has a slow float64
reference beside it, named ``*_reference``, and the tests compare the two.
"""
