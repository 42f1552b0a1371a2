"""One model over many devices, and one program over many processes.

`mesh.make` lays devices out, `rules` say what is divided over which axis of it, `placing.shard` and `placing.drafter`
put a target and what drafts for it there; `processes` joins several hosts.
"""
