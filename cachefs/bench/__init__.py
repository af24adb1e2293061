"""Measuring how fast a directory takes checkpoints: the load, the numbers, the pictures.

Lives here: what a run does (`workload`), the processes that do it (`rank`), their conductor
(`runner`), what the numbers mean (`stats`, `report`) and the picture (`plot`); and, beside it, a
simulation of many nodes that share a store (`crowd`). May not live here: parsing and printing
(`cli.bench`), and anything that knows a mount from another directory: a run must do the same in
both, or it compares nothing.
"""
