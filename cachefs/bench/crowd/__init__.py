"""A crowd of nodes that save at the same second, simulated: who is done when, and at what cost.

    python -m cachefs.bench.crowd --nodes 1,10,100,1000,2000 --plot crowd.png

Lives here: the store, the nodes and the clock of the simulation (`simulation`), how a node behaves
(`policies`: the real pacer of cachefs, the real retry handlers of botocore), what came of it
(`outcome`, `plot`). May not live here: anything that sleeps, reads a clock, or draws a random
number without a seed. A run is a function of its arguments.
"""
