"""Seeing what a mount does, and telling it what to do: metrics, log, run files, control socket.

Lives here: the table of metrics and its HTTP endpoint; the log's set-up; the files under the run
directory that lead from a path to its daemon; the control protocol with its server (in the daemon)
and its client (in the command line). May not live here: what an operation does (handlers are given
to the control server), any filesystem or store logic. `runfiles`, `protocol` and `client` use the
standard library only, so that a status query starts fast.
"""
