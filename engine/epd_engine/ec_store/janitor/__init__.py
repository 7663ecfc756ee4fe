"""The janitor: the one that deletes. One for each store, kept single by a lease with fencing. No torch.

lease.py       who is the janitor
scan.py        what lies in the store, by looking
index.py       what was seen, in SQLite on disk, so that memory does not grow with the store
clearing.py    what must go, in which order
quarantine.py  where damaged entries go
keeper.py      one look at a store, from lease to report
service.py     the process: loop, signals, HTTP
"""
