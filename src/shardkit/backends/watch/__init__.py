"""No rank waits without a name: what ranks do is compared before they do it, and waits are watched.

`sequence` foretells what a rank does next. `channel` asks the others before it does something else,
and watches its waits. `station` is this process' end: it asks the other ranks where they are, and
answers them. `place` says where the main thread is, `answer` what a rank tells of itself, and
`verdict` what follows from all answers.
"""
