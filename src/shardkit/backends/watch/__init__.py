"""No rank waits without a name: what ranks do is compared before they do it, and waits are watched.

`sequence` foretells what a rank does next. `channel` asks the others before it does something else,
and has its waits watched. `watchdog` is this process' part: it asks the other ranks where they are
in `rounds` over a `store`, and answers them. `place` says where the main thread is, `status` what
a rank tells of itself, and `diagnosis` what follows from what all tell: who is waited for, and
whether it is proved that the run cannot go on. Then `abort` ends the waits.
"""
