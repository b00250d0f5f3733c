"""How do taps reach the modules of a model, and how are values copied and gathered?"""
