"""Progress of the ranks: which ranks wait for which, and what the awaited ranks do. Torch-free.

Every rank looks at its own training thread once a second (`watcher.py`), keeps what it saw where it survives the
process (`black_box.py`), and tells it to the others while somebody waits. One rank judges what all have seen
(`waits.py`). Of a process that does not answer, what the kernel shows is read (`kernel.py`).
"""
