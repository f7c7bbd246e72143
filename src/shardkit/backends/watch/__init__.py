"""No rank waits without a name: what ranks do is compared before they do it, and waits are watched.

`history` is what this process has issued on each process group, and what it waits for; what comes
next is foretold from it. `watchdog` is this process' part: it asks the others before this rank does
something else, has its waits watched, asks the other ranks where they are in `rounds` over a store,
answers them, and ends waits that are in vain. `status` is what a rank tells of itself, and
`diagnosis` what follows from what all tell: who is waited for, and whether it is proved that the
run cannot go on. `runs` lets another terminal find the run.
"""
