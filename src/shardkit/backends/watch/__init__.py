"""Watch over ranks: collectives are compared before they are issued, and waits are watched.

`history` has what this process has issued on each process group, and what it waits for; it predicts
the next collective. `watchdog` is the part of this process: it asks the other ranks before this
rank issues an unexpected collective, watches its waits, asks the other ranks where they are in
`rounds` over a store, answers them, and ends waits that are in vain. `status` is what a rank says
about itself. `diagnosis` draws conclusions from all statuses: which ranks are awaited, and whether
it is proved that the run cannot go on. `runs` lets another terminal find the run.
"""
