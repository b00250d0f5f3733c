"""How well do layers predict recordings of a brain, in time, and how well could anything?"""
