"""How does a process extract its share of a dataset, and do all shares make one extraction?"""
