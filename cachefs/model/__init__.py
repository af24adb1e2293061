"""The rules of cachefs as plain values and arithmetic.

Here live extents, generation states, effect order, upload plans, pacing, watermarks, survival
levels and the names of checkpoints. Nothing here does I/O, awaits, logs, reads a clock or draws
random numbers: time is passed as ``now`` and chance as a number, so every rule can be tested
exhaustively and replayed. Nothing here imports another package of cachefs.
"""
